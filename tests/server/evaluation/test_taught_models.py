"""What is trained with torch learns from its texts, and from nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import ModelError
from server.evaluation.fine_tuning import FineTuning, fine_tuned_predictions
from server.evaluation.next_token import SmallModel, Tokenizer, most_frequent_accuracy, taught_accuracy
from tests.tiny_embedder import make_tiny_embedder

SMALL = SmallModel(vocabulary=300, width=32, layers=1, heads=2, context=24, steps=60, batch=8, learning_rate=1e-2)
COUNTING = ["one two three four five six", "three four five six seven", "two three four five"]
BACKWARDS = [" ".join(reversed(text.split())) for text in COUNTING]
KIND = ["The staff were kind.", "the nurses were kind and helped", "kind doctor, thank you", "all nurses helped"]
LATE = ["I waited three hours", "cancelled twice without a reason", "waited and nobody told me", "hours without"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random encoder."""
    return make_tiny_embedder(tmp_path_factory.mktemp("encoder"))


def test_next_tokens_are_known_after_like_texts_and_not_after_others() -> None:
    tokenizer = Tokenizer(COUNTING, SMALL)
    tests = tokenizer(COUNTING)
    like, unlike = (taught_accuracy(tokenizer(t * 4), tests, len(tokenizer), SMALL) for t in (COUNTING, BACKWARDS))
    assert like.value > 0.6  # 0.78 to 0.89 over ten seeds
    assert unlike.value < 0.4
    assert like.low is not None
    assert like.high is not None
    assert like.low <= like.value <= like.high


def test_next_tokens_are_the_same_every_time() -> None:
    tokenizer = Tokenizer(COUNTING, SMALL)
    tokens = tokenizer(COUNTING)
    before = torch.get_rng_state()
    first, second = (taught_accuracy(tokens, tokens, len(tokenizer), SMALL) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), before)


def test_the_most_frequent_token_is_right_as_often_as_it_is_there() -> None:
    assert most_frequent_accuracy([[0, 5, 5, 6]], [[0, 5, 7], [0, 5, 5, 8]]) == pytest.approx(3 / 5)


def test_tokens_are_cut_to_the_context() -> None:
    tokenizer = Tokenizer(COUNTING, SMALL)
    assert len(tokenizer(["one " * 500])[0]) == SMALL.context
    assert len(tokenizer(["\u6f22"])[0]) > 2


def test_fine_tuning_learns_the_labels_that_it_is_given(encoder: Path) -> None:
    # Asked about the texts it was taught: what a random encoder says of others hangs on the machine's rounding.
    true = ["kind"] * 4 + ["late"] * 4
    swapped = ["late"] * 4 + ["kind"] * 4
    options = FineTuning(epochs=8, batch=8, learning_rate=1e-2)
    for labels in (true, swapped):
        assert fine_tuned_predictions(encoder, [*KIND, *LATE] * 4, labels * 4, [*KIND, *LATE], options) == labels


def test_fine_tuning_tells_how_far_it_is_and_leaves_chance_alone(encoder: Path) -> None:
    told: list[tuple[int, int]] = []
    before = torch.get_rng_state()
    options = FineTuning(epochs=2, batch=4)
    fine_tuned_predictions(encoder, KIND + LATE, ["a"] * 4 + ["b"] * 4, KIND, options, lambda *at: told.append(at))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_corpus_of_one_label_needs_no_training(tmp_path: Path) -> None:
    assert fine_tuned_predictions(tmp_path, KIND, ["a"] * 4, LATE) == ["a"] * 4


def test_a_folder_that_is_no_encoder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't be loaded; the folder of an encoder"):
        fine_tuned_predictions(tmp_path, KIND + LATE, ["a"] * 4 + ["b"] * 4, KIND)
