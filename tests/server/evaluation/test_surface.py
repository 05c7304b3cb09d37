"""Labels, lengths, words and repetitions: known values."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from server.evaluation import surface
from server.evaluation.texts import Texts


def test_variation_is_half_the_difference_of_shares() -> None:
    assert surface.variation("aabb", "aabb") == 0
    assert surface.variation("aa", "bb") == 1
    assert surface.variation("aaab", "abbc") == pytest.approx(0.5)
    assert surface.variation_from_even("aaab") == pytest.approx(0.25)
    assert surface.variation_from_even("ab") == 0


def test_the_interval_of_variation_is_as_wide_as_samples_differ() -> None:
    def draws(seed: int) -> tuple[list[str], list[str]]:
        chance = np.random.default_rng(seed)
        return chance.choice(list("abc"), 300).tolist(), chance.choice(list("abc"), 300, p=[0.6, 0.2, 0.2]).tolist()

    values = [surface.variation(*draws(seed)) for seed in range(100)]
    found = surface.variation_estimate(*draws(0))
    assert found.high is not None
    assert (found.high - found.value) / 1.96 == pytest.approx(np.std(values), rel=0.35)


def test_lengths_that_are_three_words_longer_are_three_apart() -> None:
    short = surface.lengths([" ".join("w" * n) for n in (1, 2, 5, 9)])
    assert short.tolist() == [1, 2, 5, 9]
    assert surface.length_distance(short, short + 3) == pytest.approx(3)
    estimate = surface.length_distance_estimate(np.arange(100), np.arange(100) + 3)
    assert estimate.value == pytest.approx(3)
    assert estimate.low is not None
    assert 2 < estimate.low <= 3


def test_distinct_counts_runs_within_texts() -> None:
    texts = ["The cat sat.", "the CAT ran."]
    assert surface.distinct(texts, 1, 100) == pytest.approx(5 / 8)
    assert surface.distinct(texts, 2, 100) == pytest.approx(5 / 6)
    assert surface.distinct(texts, 2, 3) == 1
    assert surface.distinct(["a"], 2, 10) == 0
    assert surface.run_count(texts, 2) == 6


def test_duplicates_are_told_from_near_ones() -> None:
    long = "the staff on the ward were kind and explained everything to me and my family"
    texts = Texts("corpus", (long, long.upper() + " ", long + "!", "something else altogether, nothing alike"))
    assert surface.duplicates(texts) == pytest.approx(1 / 4)
    assert surface.near_duplicates(texts) == pytest.approx(2 / 4)
    other_code = Texts("corpus", (long, long + "!"), {"topic": ("a", "b")})
    assert surface.near_duplicates(other_code) == 0


def test_shared_texts_are_equal_but_for_case_and_blanks() -> None:
    assert surface.shared_share(Texts("a", ("One  two", "three")), Texts("b", ("one two",))) == 0.5


def test_shuffled_words_are_the_same_words_in_other_texts() -> None:
    texts = [f"a{i} b{i} c{i % 3}" for i in range(50)]
    shuffled = surface.shuffled_words(texts)
    assert Counter(" ".join(shuffled).split()) == Counter(" ".join(texts).split())
    assert [len(t.split()) for t in shuffled] == [3] * 50
    assert shuffled != texts
    assert shuffled == surface.shuffled_words(texts)
