"""Tokens are drawn from exactly the nucleus, and every text's chance is its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from common.errors import GenerationError
from server.decoding import sampling
from server.decoding.sampling import Randomness, nucleus_sample, text_key

DRAWS = 20_000


def nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Probability of every token by the definition, float64 of shape ``(vocabulary,)``."""
    mass = logits.double().softmax(0)
    # The number decides between equals.
    order = mass.sort(descending=True, stable=True).indices
    before = mass[order].cumsum(0) - mass[order]
    kept = order[before < top_p]
    exact = torch.zeros_like(mass)
    exact[kept] = mass[kept] / mass[kept].sum()
    return exact


def pvalue(drawn: torch.Tensor, exact: torch.Tensor) -> float:
    """Of a chi-square test; 0 if a token was drawn that can't be. Rare tokens count as one."""
    counted = torch.bincount(drawn, minlength=len(exact)).double()
    if counted[exact == 0].sum():
        return 0.0
    expected = exact * counted.sum()
    rare = expected < 10
    groups = [torch.cat([values[~rare], values[rare].sum()[None]]) for values in (counted, expected)]
    observed, wanted = (group[groups[1] > 0].numpy() for group in groups)
    return float(stats.chisquare(observed, wanted).pvalue)


def _logits(tokens: int, scale: float) -> torch.Tensor:
    return torch.randn(tokens, generator=torch.Generator().manual_seed(0)) * scale


def _draw(logits: torch.Tensor, top_p: float, draws: int = DRAWS) -> torch.Tensor:
    return nucleus_sample(logits.expand(draws, -1), top_p, Randomness([text_key(row) for row in range(draws)]))


@pytest.mark.parametrize("tries", [1, 8])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_sampled_tokens_follow_the_exact_nucleus(tries: int, top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition. With a single try most tokens come from the ordered nucleus; 300 are over a block."""
    monkeypatch.setattr(sampling, "TRIES", tries)
    monkeypatch.setattr(sampling, "HEAD", 4)
    logits = _logits(300, 1.0)
    drawn = _draw(logits, top_p)
    assert pvalue(drawn, nucleus(logits, top_p)) > 1e-4
    # The twin: another nucleus, or another temperature, is noticed.
    assert pvalue(drawn, nucleus(logits, top_p - 0.1)) < 1e-9
    assert pvalue(drawn, nucleus(logits / 1.2, top_p)) < 1e-9


def test_of_equally_likely_tokens_those_with_lower_numbers_are_in_the_nucleus() -> None:
    drawn = _draw(torch.zeros(300), 0.5)
    assert drawn.max() == 149
    assert pvalue(drawn, nucleus(torch.zeros(300), 0.5)) > 1e-4


@pytest.mark.parametrize("top_p", [1e-6, 0.95, 1.0])
def test_one_likely_token_and_tokens_that_cannot_be(top_p: float) -> None:
    logits = torch.full((1000,), float("-inf"))
    logits[777] = 3.0
    assert (_draw(logits, top_p, 50) == 777).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error_that_says_so(bad: float) -> None:
    logits = _logits(300, 1.0).repeat(3, 1)
    logits[1, 7] = bad
    with pytest.raises(GenerationError, match="logits"):
        nucleus_sample(logits, 0.9, Randomness([0, 1, 2]))


def test_a_text_draws_the_same_beside_any_others_and_after_a_move() -> None:
    alone, beside = Randomness([7]), Randomness([1, 7, 3])
    row, other = np.array([0]), np.array([1])
    assert alone.draw(row) == beside.draw(other)
    beside.draw(np.array([0, 2]))
    beside.move(1, 0)
    assert alone.draw(row) == beside.draw(row)
    beside.begin(0, 7)
    assert beside.draw(row) == Randomness([7]).draw(row), "begun anew"


def test_uniform_numbers_are_uniform_along_a_text_and_across_texts() -> None:
    texts = Randomness([text_key("seed", number) for number in range(200)])
    drawn = np.stack([texts.draw(np.arange(200)) for _ in range(200)])
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 1e-4
    for axis in (0, 1):
        following = np.corrcoef(drawn.take(range(199), axis).ravel(), drawn.take(range(1, 200), axis).ravel())[0, 1]
        assert abs(following) < 5 / 200


def test_keys_differ_in_every_part_of_the_place() -> None:
    places = [(0, "pool", 1, 2, 3), (1, "pool", 1, 2, 3), (0, "more", 1, 2, 3), (0, "pool", 12, 3), (0, "pool", 1, 23)]
    assert len({text_key(*place) for place in places}) == len(places)
