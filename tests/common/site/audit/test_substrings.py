"""The longest shared run is exact, whatever the texts, and takes the memory of two blocks."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.site.audit.substrings import NOWHERE, longest_shared

ALPHABETS = ("a", "ab", "abcd", "aé😀\u0301")


@st.composite
def _sides(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Texts and documents of few characters, with parts of documents planted in texts."""
    some = st.text(st.sampled_from(draw(st.sampled_from(ALPHABETS))), max_size=50)
    documents = draw(st.lists(some, max_size=4))
    texts = draw(st.lists(some, max_size=4))
    for document in documents:
        start = draw(st.integers(0, len(document)))
        texts.append(draw(some) + document[start : draw(st.integers(start, len(document)))] + draw(some))
    return texts, documents


@given(_sides(), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 20, 100, 1 << 20]))
def test_it_is_what_a_naive_search_finds(sides: tuple[list[str], list[str]], shortest: int, block: int) -> None:
    texts, documents = sides
    runs = longest_shared(texts, documents, shortest=shortest, block=block)
    for i, text in enumerate(texts):
        length = _naive(text, documents, shortest)
        assert runs.lengths[i] == length
        if length:
            document, place, start = documents[runs.documents[i]], runs.places[i], runs.starts[i]
            assert text[start : start + length] == document[place : place + length]
        else:
            assert runs.documents[i] == NOWHERE


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 4097])
def test_a_run_of_any_length_is_found_to_the_character(length: int) -> None:
    chance = np.random.default_rng(length)
    run = "".join(map(chr, chance.integers(0x4E00, 0x9FFF, length)))
    runs = longest_shared([f"before {run} after"], ["nothing", f"{run[:-1]}?", f"other{run}words"])
    assert runs.lengths.tolist() == [length if length >= 16 else 0]


def test_a_run_does_not_go_on_in_the_next_text() -> None:
    first, second = "the first half of a sentence, ", "and the second half of that sentence"
    assert longest_shared([first + second], [first, second]).lengths.tolist() == [len(second)]


def test_nothing_on_a_side_is_nothing_shared() -> None:
    assert longest_shared(["some text that is long enough"], []).lengths.tolist() == [0]
    assert longest_shared([], ["some text that is long enough"]).lengths.size == 0


def test_texts_of_one_letter_take_no_more_memory_than_others() -> None:
    # Each stops at another length, and the document has each of these lengths at every place.
    texts, documents = ["a" * length for length in range(128, 256)], ["a" * 10_000]
    longest_shared(texts[:1], documents)
    tracemalloc.start()
    try:
        runs = longest_shared(texts, documents)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert runs.lengths.tolist() == list(range(128, 256))
    characters = sum(map(len, texts)) + sum(map(len, documents))
    # Twice the usual; with all texts at once it would be twenty times.
    assert peak < 260 * characters


def test_progress_ends_with_all_of_it() -> None:
    seen: list[float] = []
    longest_shared(["a text of thirty characters, or so"] * 3, ["another text"] * 3, block=40, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1


def test_a_result_does_not_show_texts() -> None:
    text = "a very private text of a document"
    runs = longest_shared([text], [text])
    assert "private" not in repr(runs)


def _naive(text: str, documents: list[str], shortest: int) -> int:
    best = 0
    for document in documents:
        for start in range(len(text)):
            while start + best < len(text) and text[start : start + best + 1] in document:
                best += 1
    return best if best >= shortest else 0
