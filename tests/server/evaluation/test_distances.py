"""Distances are those of theory for Gaussians, and those of a plain computation for neighbourhoods."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import sqrtm
from scipy.spatial.distance import cdist

from common.errors import DataError
from server.evaluation import distances
from server.evaluation.distances import frechet, frechet_estimate, nearest_two, neighbourhoods


def _gaussian(seed: int, number: int, mean: float = 0.0, size: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, 1, (number, size)).astype(np.float32)


def test_frechet_of_two_gaussians_is_the_closed_form() -> None:
    chance = np.random.default_rng(0)
    turned = [chance.normal(size=(5, 5)) for _ in range(2)]
    covariances = [a @ a.T / 5 for a in turned]
    means = [np.zeros(5), np.array([1.0, 0, 0.5, 0, 0])]
    first, second = (
        chance.multivariate_normal(m, c, 60_000).astype(np.float32) for m, c in zip(means, covariances, strict=True)
    )
    expected = ((means[0] - means[1]) ** 2).sum() + np.trace(
        covariances[0] + covariances[1] - 2 * np.real(sqrtm(covariances[0] @ covariances[1]))
    )
    assert frechet(first, second) == pytest.approx(expected, rel=0.02)


def test_frechet_of_equal_sets_is_zero_and_stays_finite_with_few_points() -> None:
    few, others = _gaussian(0, 30, size=200), _gaussian(1, 30, size=200)
    assert frechet(few, few) == pytest.approx(0, abs=1e-6)
    assert 0 < frechet(few, others) < 400
    same = np.ones((40, 8), dtype=np.float32)
    assert frechet(same, same) == 0


def test_frechet_of_fewer_points_is_larger_which_is_why_sizes_are_equal() -> None:
    few, many = (frechet(_gaussian(0, n, size=50), _gaussian(1, n, size=50)) for n in (100, 2000))
    assert few > 2 * many


def test_the_interval_of_frechet_is_as_wide_as_samples_differ() -> None:
    values = [frechet(_gaussian(s, 500), _gaussian(1000 + s, 500, 0.5)) for s in range(40)]
    found = frechet_estimate(_gaussian(0, 500), _gaussian(1000, 500, 0.5))
    assert found.high is not None
    assert (found.high - found.value) / 1.96 == pytest.approx(np.std(values), rel=0.5)


@pytest.mark.parametrize("block", [1, 1 << 22])
def test_neighbourhoods_are_those_of_a_plain_computation(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "_BLOCK", block)
    real, synthetic, k = _gaussian(0, 120, size=3), _gaussian(1, 90, 0.7, size=3), 4
    found = neighbourhoods(real, synthetic, k)
    of_real = np.sort(cdist(real, real), axis=1)[:, k]
    of_synthetic = np.sort(cdist(synthetic, synthetic), axis=1)[:, k]
    apart = cdist(real, synthetic)
    near = apart <= of_real[:, None]
    assert found.precision.value == pytest.approx(near.any(axis=0).mean())
    assert found.recall.value == pytest.approx((apart <= of_synthetic).any(axis=1).mean())
    assert found.density.value == pytest.approx(near.sum(axis=0).mean() / k)
    assert found.coverage.value == pytest.approx((apart.min(axis=1) <= of_real).mean())


def test_a_corpus_that_forgot_half_has_precision_without_recall() -> None:
    real = np.concatenate([_gaussian(0, 100, -20), _gaussian(1, 100, 20)])
    found = neighbourhoods(real, _gaussian(2, 100, -20))
    assert found.precision.value > 0.85
    assert found.recall.value < 0.55
    assert found.coverage.value < 0.55


def test_a_corpus_of_noise_has_recall_without_precision() -> None:
    wide = np.random.default_rng(3).normal(0, 30, (200, 5)).astype(np.float32)
    found = neighbourhoods(_gaussian(0, 200), wide)
    assert found.precision.value < 0.2
    assert found.recall.value > 0.8


def test_equal_sets_are_everything_and_far_ones_nothing() -> None:
    real = _gaussian(0, 60)
    same, far = neighbourhoods(real, real), neighbourhoods(real, real + 100)
    assert (same.precision.value, same.recall.value, same.coverage.value) == (1, 1, 1)
    assert (far.precision.value, far.recall.value, far.density.value, far.coverage.value) == (0, 0, 0, 0)


def test_repeated_texts_do_not_fall_out() -> None:
    repeated = np.repeat(_gaussian(0, 4), 10, axis=0)
    assert neighbourhoods(repeated, repeated).precision.value == 1


def test_nearest_two_are_those_of_a_plain_computation() -> None:
    points, others = _gaussian(0, 30), _gaussian(1, 40)
    np.testing.assert_allclose(nearest_two(points, others), np.sort(cdist(points, others), axis=1)[:, :2], rtol=1e-5)
    own = np.sort(cdist(points, points), axis=1)[:, 1:3]
    np.testing.assert_allclose(nearest_two(points, points, themselves=True), own, rtol=1e-5)


def test_too_few_points_are_told() -> None:
    with pytest.raises(DataError, match="5 texts on one side; more than 5"):
        neighbourhoods(_gaussian(0, 5), _gaussian(1, 50))
    with pytest.raises(DataError, match="1 texts to compare with; at least 2"):
        nearest_two(_gaussian(0, 5), _gaussian(1, 1))
