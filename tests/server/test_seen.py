"""What was seen is known again, exactly or nearly, and memory stays small."""

from __future__ import annotations

import numpy as np
import pytest

from server.seen import MOST_PLACES, NearTexts, SeenTexts

WORDS = [f"word{i}" for i in range(400)]


def _text(source: np.random.Generator, words: int = 30) -> str:
    return " ".join(source.choice(WORDS, words))


def test_digests_are_known_again_through_growth_and_collisions() -> None:
    source, seen = np.random.default_rng(0), SeenTexts()
    # Some share the place that they are looked for at.
    colliding = np.arange(1, 301, dtype=np.uint64) << np.uint64(32)
    digests = np.concatenate([source.integers(2**63, size=3000, dtype=np.uint64), colliding])
    for digest in digests:
        assert digest not in seen
        seen.add(digest)
        assert digest in seen
    assert len(seen) == 3300
    for digest in digests:
        seen.add(digest)
        assert digest in seen
    assert len(seen) == 3300, "known ones aren't counted again"
    assert np.uint64(2**63 + 12345) not in seen


def test_a_digest_of_zero_is_a_digest_too() -> None:
    seen = SeenTexts()
    assert np.uint64(0) not in seen
    seen.add(np.uint64(0))
    assert np.uint64(0) in seen


def test_a_million_digests_take_32_megabytes_at_most() -> None:
    seen = SeenTexts()
    seen._count = 1_000_000
    size = seen._table.size
    while 2 * seen._count > size:
        size *= 2
    assert size * seen._table.itemsize <= 32 << 20


@pytest.mark.parametrize(("changed", "found"), [(0, 1.0), (1, 0.9), (20, 0.0)])
def test_nearly_like_texts_are_found_and_others_are_not(changed: int, found: float) -> None:
    source, near = np.random.default_rng(0), NearTexts(0.8, 1000)
    hits = 0
    for _ in range(200):
        words = _text(source).split()
        assert not near.add(" ".join(words), 0)
        for place in source.choice(30, changed, replace=False):
            words[place] = f"other{source.integers(10**6)}"
        hits += near.add(" ".join(words), 0)
    assert abs(hits / 200 - found) < 0.1


def test_case_is_the_callers_and_punctuation_makes_no_difference() -> None:
    near = NearTexts(0.8, 10)
    assert not near.add("the nurses were kind and the ward was clean", 0)
    assert near.add("the nurses were kind, and the ward was clean!", 0)


def test_another_code_has_its_own_texts() -> None:
    near = NearTexts(0.8, 10)
    assert not near.add("the nurses were kind and the ward was clean", 0)
    assert not near.add("the nurses were kind and the ward was clean", 1)


@pytest.mark.parametrize("text", ["", "a", "?!", "\ud800", "日本語", "🙂🙂"])
def test_short_and_odd_texts_are_compared_as_a_whole(text: str) -> None:
    near = NearTexts(0.8, 10)
    assert not near.add(text, 0)
    assert near.add(text, 0)
    assert not near.add(f"{text} and quite another one", 0)


@pytest.mark.parametrize("threshold", [0.3, 0.8, 0.99])
def test_memory_for_near_duplicates_has_a_limit(threshold: float) -> None:
    """Beyond it the oldest texts are forgotten; with room for all of them none is."""
    assert NearTexts(threshold, 10**9)._table.size <= MOST_PLACES
    source, near = np.random.default_rng(0), NearTexts(threshold, 10)
    texts = [_text(source) for _ in range(300)]
    for text in texts:
        near.add(text, 0)
    assert near.add(texts[-1], 0)
    assert near._table.size <= 32 * 64
