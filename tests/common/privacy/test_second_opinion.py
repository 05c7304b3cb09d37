"""The second accountant agrees with every other way to the same number, and never says less than the truth."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant
from opacus.accountants.analysis import gdp
from scipy.special import log_ndtr, ndtr

from common.errors import PrivacyError
from common.privacy import second_opinion
from common.privacy.accounting import DiscreteGaussian, Mechanism, SubsampledGaussian, describe, joint_epsilon
from common.privacy.second_opinion import delta, epsilon

TRAINING = {"mechanism": "subsampled-gaussian", "noise_multiplier": 1.0, "sample_rate": 0.064, "steps": 47}
PROFILE = {"mechanism": "discrete-gaussian", "scale": 8.0, "cells_per_unit": 1}

FACTS = [
    (1000, 64, 3, 1.0, 1.98053),
    (2250, 64, 3, 0.8, 2.33337),
    (15000, 256, 5, 0.7, 3.93780),
    (15000, 64, 5, 0.6, 3.23572),
    (1000, 256, 5, 2.0, 1.87517),
]
"""n, B, epochs, noise multiplier and the epsilon at 1/n that was measured once with dp-accounting and frozen."""

LEDGERS: list[tuple[tuple[Mechanism, ...], float]] = [
    ((SubsampledGaussian(1.0, 0.064, 47),), 1e-3),
    ((SubsampledGaussian(0.6, 64 / 15000, 1172),), 1 / 15000),
    ((SubsampledGaussian(1.0, 1e-6, 1172),), 1e-9),
    ((SubsampledGaussian(0.5, 1e-4, 1172),), 1e-6),
    ((SubsampledGaussian(50.0, 0.01, 100),), 1e-5),
    ((SubsampledGaussian(1.0, 1.0, 10),), 1e-5),
    ((SubsampledGaussian(0.5, 1.0, 1),), 1e-5),
    ((SubsampledGaussian(1.5, 0.9999, 10),), 1e-6),
    ((SubsampledGaussian(1.0, 0.064, 47),), 1e-11),
    ((DiscreteGaussian(0.3, 1),), 1e-4),
    ((DiscreteGaussian(0.5, 1),), 1e-4),
    ((DiscreteGaussian(0.7, 1),), 1e-4),
    ((DiscreteGaussian(0.3, 4),), 1e-4),
    ((DiscreteGaussian(1e4, 1),), 1e-5),
    ((DiscreteGaussian(2.4638, 8), DiscreteGaussian(8.0, 1)), 1 / 2000),
    ((SubsampledGaussian(0.8, 64 / 2250, 106), DiscreteGaussian(14.97, 1)), 1e-4),
    ((SubsampledGaussian(0.6079, 0.064, 47), DiscreteGaussian(1.126, 3)), 1e-3),
]


@pytest.mark.parametrize(("mechanisms", "promise"), LEDGERS)
def test_it_agrees_with_dp_accounting(mechanisms: tuple[Mechanism, ...], promise: float) -> None:
    first = joint_epsilon(mechanisms, promise)
    second = epsilon([describe(mechanism) for mechanism in mechanisms], promise)
    # dp-accounting rounds a discrete mechanism's losses up to the grid, so ours may be lower by an interval per cell.
    assert -1e-3 <= second - first <= 2e-3 + 1e-3 * first


@pytest.mark.parametrize(("n", "batch", "epochs", "noise", "frozen"), FACTS)
def test_it_finds_the_frozen_values(n: int, batch: int, epochs: int, noise: float, frozen: float) -> None:
    assert epsilon(_facts_ledger(n, batch, epochs, noise), 1 / n) == pytest.approx(frozen, abs=2e-5)


@pytest.mark.parametrize(("n", "batch", "epochs", "noise", "frozen"), FACTS)
def test_it_agrees_with_opacus_prv(n: int, batch: int, epochs: int, noise: float, frozen: float) -> None:
    accountant = PRVAccountant()
    accountant.history = [(noise, batch / n, math.ceil(epochs * n / batch))]
    theirs = accountant.get_epsilon(1 / n, eps_error=0.01)
    assert epsilon(_facts_ledger(n, batch, epochs, noise), 1 / n) == pytest.approx(theirs, abs=0.02)


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("multiple", [0.0, 1.0, 3.5])
def test_one_gaussian_is_never_below_its_closed_form_and_close(noise: float, multiple: float) -> None:
    at = multiple / noise
    truth = float(ndtr(1 / (2 * noise) - at * noise) - math.exp(at + float(log_ndtr(-1 / (2 * noise) - at * noise))))
    assert truth <= delta([_gaussian(noise)], at) <= truth + 1e-8
    assert at - 1e-9 <= epsilon([_gaussian(noise)], truth) <= at + 1e-3


@pytest.mark.parametrize("noise", [2.0, 30.0])
def test_many_gaussians_are_never_below_their_closed_form_and_close(noise: float) -> None:
    """T Gaussians are one of noise / sqrt(T)."""
    one = noise / math.sqrt(400)
    for deviations in (1, 4, 6):
        at = 1 / (2 * one**2) + deviations / one
        truth = float(ndtr(1 / (2 * one) - at * one) - math.exp(at + float(log_ndtr(-1 / (2 * one) - at * one))))
        assert truth <= delta([_gaussian(noise, 400)], at) <= truth * (1 + 1e-4) + 1e-12


@pytest.mark.parametrize("interval", [1e-3, 1e-2])
@pytest.mark.parametrize("scale", [0.3, 0.5, 0.7, 1.0, 2.5])
def test_two_cells_are_never_below_their_enumeration_and_close(scale: float, interval: float) -> None:
    ledger = [{"mechanism": "discrete-gaussian", "scale": scale, "cells_per_unit": 2}]
    for at in (0.0, 0.1, 1.0, 3.0, 8.0, 30.0):
        truth = _enumerated(scale, at)
        assert truth <= delta(ledger, at, interval) <= truth + interval + 1e-15


def test_masses_that_move_down_are_noticed_by_the_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the test above: losses rounded down to the grid instead of spread."""
    ledger = [{"mechanism": "discrete-gaussian", "scale": 2.5, "cells_per_unit": 2}]
    honest = second_opinion._on_grid
    monkeypatch.setattr(
        second_opinion, "_on_grid", lambda masses, losses, cells, interval: honest(masses, losses - 1, cells, interval)
    )
    assert delta(ledger, 0.5, 1e-2) < _enumerated(2.5, 0.5)


def test_training_costs_what_a_simulation_of_it_does() -> None:
    """The mean over 400 000 drawn losses, five standard errors around it; removal is the costlier direction."""
    s, q, steps, at = 1.0, 0.064, 4, 0.3
    random = np.random.default_rng(20261201)
    for removed in (True, False):
        hit = (random.random((400_000, steps)) < q) & removed
        y = random.normal(hit.astype(float), s)
        loss = np.log1p(q * np.expm1((2 * y - 1) / (2 * s * s)))
        total = loss.sum(axis=1) if removed else -loss.sum(axis=1)
        lost = np.maximum(0, -np.expm1(at - total))
        error = 5 * lost.std() / math.sqrt(lost.size)
        bound = delta([{**TRAINING, "steps": steps}], at)
        assert lost.mean() - error <= bound
        assert not removed or bound <= lost.mean() + error


def test_the_easier_direction_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = epsilon([TRAINING], 1e-3)
    both = second_opinion._both_directions
    for side, falls in ((0, False), (1, True)):
        with monkeypatch.context() as patch:
            patch.setattr(second_opinion, "_both_directions", lambda *given, side=side: [both(*given)[side]])
            assert (epsilon([TRAINING], 1e-3) < honest - 0.1) is falls


def test_the_central_limit_approximation_is_shown_to_be_too_low() -> None:
    theirs = gdp.compute_eps_poisson(steps=47, noise_multiplier=1.0, sample_rate=0.064, delta=1e-3)
    assert theirs == pytest.approx(1.600, abs=0.005)
    assert theirs < 0.95 * epsilon([TRAINING], 1e-3)


@settings(max_examples=15, deadline=None)
@given(
    noise=st.floats(0.4, 10),
    rate=st.floats(1e-4, 0.5),
    steps=st.integers(1, 500),
    scale=st.floats(0.3, 20),
    cells=st.integers(1, 10),
    factor=st.floats(1, 2),
)
def test_more_releases_or_less_noise_never_cost_less(
    noise: float, rate: float, steps: int, scale: float, cells: int, factor: float
) -> None:
    def cost(**changed: float) -> float:
        value = {"noise": noise, "rate": rate, "steps": steps, "scale": scale, "cells": cells, **changed}
        return epsilon(
            [
                {
                    "mechanism": "subsampled-gaussian",
                    "noise_multiplier": value["noise"],
                    "sample_rate": value["rate"],
                    "steps": value["steps"],
                },
                {"mechanism": "discrete-gaussian", "scale": value["scale"], "cells_per_unit": value["cells"]},
            ],
            1e-5,
            4e-3,
        )

    base = cost()
    slack = 1e-3 * (1 + base)
    assert cost(noise=noise / factor) >= base - slack
    assert cost(rate=rate * factor) >= base - slack
    assert cost(steps=math.ceil(steps * factor)) >= base - slack
    assert cost(cells=cells + 1) >= base - slack


@pytest.mark.parametrize("promise", [1e-10, 1e-3, 0.5])
@pytest.mark.parametrize("ledger", [[TRAINING], [PROFILE], [TRAINING, PROFILE, PROFILE]])
def test_epsilon_keeps_its_delta_and_a_smaller_one_would_not(ledger: list[dict[str, Any]], promise: float) -> None:
    found = epsilon(ledger, promise)
    assert delta(ledger, found) <= promise
    assert found == 0 or delta(ledger, found - 1e-5) > promise


def test_a_finer_grid_is_never_worse_and_a_coarse_one_still_valid() -> None:
    found = [epsilon([TRAINING, PROFILE], 1e-4, interval) for interval in (1e-1, 1e-2, 1e-3, 1e-4)]
    assert found == sorted(found, reverse=True)
    assert found[0] < found[-1] * 1.2


def test_releases_may_be_listed_in_any_order_and_split() -> None:
    whole = epsilon([TRAINING, PROFILE], 1e-4)
    assert epsilon([PROFILE, {**TRAINING, "steps": 40}, {**TRAINING, "steps": 7}], 1e-4) == pytest.approx(whole)


def test_enough_noise_costs_nothing() -> None:
    assert epsilon([_gaussian(1e3)], 1e-3) == 0


@pytest.mark.parametrize(
    ("ledger", "says"),
    [
        ([], "mechanisms is []"),
        (None, "mechanisms is None"),
        (TRAINING, "mechanisms is {"),
        (["training"], "mechanism is 'training'"),
        ([{}], "mechanism is {}"),
        ([{"mechanism": "laplace", "scale": 1.0}], "subsampled-gaussian or discrete-gaussian is accepted"),
        ([{**PROFILE, "mechanism": ["discrete-gaussian"]}], "mechanism is {"),
        ([{"mechanism": "discrete-gaussian", "scale": 1.0}], "exactly the fields mechanism, scale, cells_per_unit"),
        ([{**TRAINING, "delta": 1e-5}], "exactly the fields mechanism, noise_multiplier, sample_rate, steps"),
        *(([{**TRAINING, "noise_multiplier": bad}], f"noise_multiplier is {bad!r}") for bad in (0, -1.0, math.nan)),
        *(([{**TRAINING, "noise_multiplier": bad}], f"noise_multiplier is {bad!r}") for bad in (True, "1", None)),
        *(([{**TRAINING, "noise_multiplier": bad}], f"noise_multiplier is {bad!r}") for bad in (math.inf, 1e-200)),
        *(
            ([{**TRAINING, "sample_rate": bad}], f"sample_rate is {bad!r}")
            for bad in (0.0, 1.0001, -0.1, math.nan, True)
        ),
        *(([{**TRAINING, "steps": bad}], f"steps is {bad!r}") for bad in (0, -1, 1.5, 47.0, True, "47", 10**400)),
        *(([{**PROFILE, "scale": bad}], f"scale is {bad!r}") for bad in (0.0, -2.0, math.inf, math.nan, True, 1e9)),
        *(([{**PROFILE, "cells_per_unit": bad}], f"cells_per_unit is {bad!r}") for bad in (0, 1.0, True, None)),
        ([TRAINING, {**PROFILE, "scale": 0}], "scale is 0"),
        ([{**TRAINING, "noise_multiplier": 0.01, "sample_rate": 1.0}], "interval is 0.0001; a coarser one"),
        ([{**TRAINING, "noise_multiplier": 1.0, "sample_rate": 1.0, "steps": 10**6}], "a coarser one (from about"),
        ([{**PROFILE, "scale": 0.01}], "interval is 0.0001; a coarser one"),
    ],
)
def test_a_ledger_that_says_nothing_sound_is_refused(ledger: Any, says: str) -> None:
    for ask in (epsilon, delta):
        with pytest.raises(PrivacyError) as refused:
            ask(ledger, 0.5)
        assert says in str(refused.value)
        assert str(refused.value).endswith(" is accepted")


@pytest.mark.parametrize("bad", [0, 1, 1.0, -1e-5, 2.0, math.nan, math.inf, True, "1e-5", None, 1e-13])
def test_a_delta_without_a_meaning_is_refused(bad: Any) -> None:
    with pytest.raises(PrivacyError, match=r"delta is .*; .* is accepted"):
        epsilon([PROFILE], bad)


def test_a_delta_that_rounding_hides_is_refused_rather_than_answered() -> None:
    many = {**TRAINING, "sample_rate": 1e-3, "steps": 10**6}
    with pytest.raises(PrivacyError, match=r"delta is 1e-11; at least .* above what rounding hides, is accepted"):
        epsilon([many], 1e-11, 1e-3)
    assert epsilon([many], 1e-8, 1e-3) > 0


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, True, "1", None])
def test_an_epsilon_without_a_meaning_is_refused(bad: Any) -> None:
    with pytest.raises(PrivacyError, match=r"epsilon is .*; .* is accepted"):
        delta([PROFILE], bad)


@pytest.mark.parametrize("ask", [epsilon, delta])
@pytest.mark.parametrize("bad", [0, -1e-4, 2.0, math.nan, True, "1e-4"])
def test_an_interval_without_a_meaning_is_refused(ask: Callable[..., float], bad: Any) -> None:
    with pytest.raises(PrivacyError, match=r"interval is .*; .* is accepted"):
        ask([PROFILE], 0.5, bad)


def test_it_shares_no_code_with_the_first_accountant() -> None:
    tree = ast.parse(Path(second_opinion.__file__).read_text(encoding="utf-8"))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    ours = {name for name in imported if name.split(".")[0] not in {"numpy", "scipy"}}
    assert ours == {"__future__", "math", "collections.abc", "dataclasses", "typing", "common.errors"}


def _gaussian(noise: float, steps: int = 1) -> dict[str, Any]:
    return {"mechanism": "subsampled-gaussian", "noise_multiplier": noise, "sample_rate": 1, "steps": steps}


def _facts_ledger(n: int, batch: int, epochs: int, noise: float) -> list[dict[str, Any]]:
    steps = math.ceil(epochs * n / batch)
    return [{**TRAINING, "noise_multiplier": noise, "sample_rate": batch / n, "steps": steps}]


def _enumerated(scale: float, at: float) -> float:
    """Delta of two cells of discrete Gaussian noise, output by output."""
    k = np.arange(-math.ceil(12 * scale) - 2, math.ceil(12 * scale) + 3)
    here, there = np.exp(-(k**2) / (2 * scale**2)), np.exp(-((k - 1) ** 2) / (2 * scale**2))
    p, q = np.multiply.outer(here, here), np.multiply.outer(there, there)
    return float(np.maximum(0, p - math.exp(at) * q).sum() / p.sum())
