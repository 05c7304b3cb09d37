"""MAUVE is near 1 for one distribution, near 0 for two that don't meet, and what the paper's formula gives between."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad

from common.errors import DataError
from server.evaluation.mauve import area, mauve


def _points(seed: int, mean: float = 0.0, number: int = 400) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, 1, (number, 8)).astype(np.float32)


def test_one_distribution_is_near_one() -> None:
    found = mauve(_points(0), _points(1))
    assert found.estimate.value > 0.93
    assert found.estimate.high == 1
    assert len(found.by_seed) == 5


def test_what_does_not_meet_is_near_zero() -> None:
    assert mauve(_points(0), _points(1, 10)).estimate.value < 0.01


def test_nearer_is_more() -> None:
    near, far = (mauve(_points(0), _points(1, shift), seeds=2).estimate for shift in (0.3, 0.8))
    assert 0.05 < far.value < near.value < 0.9
    assert far.high is not None
    assert near.low is not None
    assert far.high < near.low


def test_the_area_is_that_of_the_formula() -> None:
    # Disjoint: KL from the mixture is -log of the weight, so that the frontier is (w^5, (1 - w)^5).
    expected = quad(lambda w: (1 - w) ** 5 * 5 * w**4, 0, 1)[0]
    assert area(np.array([1.0, 0]), np.array([0, 1.0])) == pytest.approx(expected, rel=0.1)
    same = np.array([0.2, 0.3, 0.5])
    assert area(same, same) == pytest.approx(1)
    p, q = np.array([0.7, 0.3]), np.array([0.4, 0.6])
    assert area(p, q) == pytest.approx(area(q, p))

    def point(w: float) -> tuple[float, float]:
        mixed = w * p + (1 - w) * q
        return tuple(np.exp(-5 * float((d * np.log(d / mixed)).sum())) for d in (p, q))  # type: ignore[return-value]

    many = np.array([(0.0, 1.0), *(point(w) for w in np.linspace(1e-6, 1 - 1e-6, 2000)), (1.0, 0.0)])
    whole = float(np.abs(np.diff(many[:, 0]) * (many[1:, 1] + many[:-1, 1]) / 2).sum())
    assert area(p, q) == pytest.approx(whole, rel=0.01)


def test_the_interval_is_as_wide_as_samples_differ() -> None:
    values = [mauve(_points(s), _points(500 + s, 0.3), seeds=1).estimate.value for s in range(12)]
    found = mauve(_points(0), _points(500, 0.3)).estimate
    assert found.high is not None
    assert 0.4 < (found.high - found.value) / 1.96 / float(np.std(values)) < 2.5


def test_too_few_texts_are_told() -> None:
    with pytest.raises(DataError, match="39 texts on one side; at least 40"):
        mauve(_points(0), _points(1, number=39))
