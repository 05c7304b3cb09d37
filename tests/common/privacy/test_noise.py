"""Noise: right scale, right shape, from the operating system; each with a twin that has the protection off."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from common.errors import PrivacyError
from common.privacy.noise import Csprng, LatticeGaussian, discrete_gaussian
from common.privacy.values import ExactCounts, Noised, noised, post_process

DIMENSION = 100_000
STANDARD_ERROR = 1 / np.sqrt(2 * DIMENSION)


def _lattice(noise_multiplier: float = 1.0, clip: float = 1.0, dimension: int = DIMENSION) -> LatticeGaussian:
    return LatticeGaussian(dimension, max_grad_norm=clip, noise_multiplier=noise_multiplier, randomness=Csprng())


def _scale_is_right(values: np.ndarray, scale: float) -> bool:
    return bool(abs(values.std() / scale - 1) < 5 * STANDARD_ERROR)


def test_gradient_noise_has_the_planned_scale_and_shape() -> None:
    released = _lattice(noise_multiplier=0.7, clip=2.0).release(normaliser=16).array
    assert _scale_is_right(released, 0.7 * 2.0 / 16)
    assert stats.kstest(released / (1.4 / 16), "norm").pvalue > 1e-6
    assert not _scale_is_right(0.8 * released, 0.7 * 2.0 / 16), "the twin with 0.8 x noise must be caught"


def test_count_noise_has_the_planned_scale() -> None:
    noise = discrete_gaussian(ExactCounts(np.zeros(DIMENSION, np.int64), 8), 3.0).array
    assert noise.dtype == np.int64
    assert _scale_is_right(noise, 3.0)
    assert not _scale_is_right(noise // 2, 3.0)


def test_an_empty_batch_is_noise_only() -> None:
    assert _scale_is_right(_lattice().release(normaliser=1).array, 1.0)


def test_one_unit_moves_the_sum_by_at_most_c() -> None:
    """Adversarial gradients: huge, tiny, one-hot, non-finite. The integer sums differ by at most C / cell."""
    for gradient in (
        np.full(50, 1e30),
        np.full(50, 1e-30),
        np.eye(1, 50).ravel() * 7,
        np.random.default_rng(0).normal(size=50),
        np.array([np.nan] + [1.0] * 49),
        np.array([np.inf] + [1.0] * 49),
    ):
        total = _lattice(dimension=50, clip=0.5)
        before = total._sum.copy()
        total.add(gradient)
        moved = np.linalg.norm((total._sum - before).astype(np.float64)) * total._cell
        assert moved <= 0.5


def test_without_clipping_one_unit_would_move_more() -> None:
    """Twin of the above: the same gradient, added as it is."""
    gradient = np.random.default_rng(0).normal(size=50)
    assert np.linalg.norm(gradient) > 0.5


def test_a_non_finite_gradient_does_not_show() -> None:
    total = _lattice()
    total.add(np.full(DIMENSION, np.nan))
    assert np.isfinite(total.release(normaliser=1).array).all()


def test_the_order_of_units_does_not_matter() -> None:
    gradients = np.random.default_rng(1).normal(size=(20, 30))
    sums = []
    for order in (range(20), reversed(range(20))):
        total = _lattice(dimension=30)
        for index in order:
            total.add(gradients[index])
        sums.append(total._sum)
    np.testing.assert_array_equal(*sums)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_gradient_longer_than_a_block_is_clipped_as_a_whole(kind: type) -> None:
    """Coordinates are worked on in blocks; the norm is that of all of them."""
    gradient = np.random.default_rng(0).normal(size=DIMENSION).astype(kind)
    lattice = _lattice(clip=2.0)
    lattice.add(gradient)
    clipped = lattice._sum * lattice._cell
    assert np.linalg.norm(clipped) <= 2.0
    np.testing.assert_allclose(clipped, 2.0 * gradient / np.linalg.norm(gradient.astype(np.float64)), atol=1e-8)
    with pytest.raises(PrivacyError, match="shape"):
        lattice.add(gradient[:-1])


def test_one_sum_is_released_once() -> None:
    total = _lattice(dimension=3)
    total.release(normaliser=1)
    with pytest.raises(PrivacyError, match="called twice"):
        total.release(normaliser=1)


def test_seeds_do_not_reach_the_noise() -> None:
    draws = []
    for _ in range(2):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        draws.append(
            (
                _lattice(dimension=50).release(normaliser=1).array,
                discrete_gaussian(ExactCounts(np.zeros(50, np.int64), 1), 10.0).array,
                Csprng().poisson_sample(1000, 0.5),
            )
        )
    for first, second in zip(*draws, strict=True):
        assert not np.array_equal(first, second)
    torch.manual_seed(0)
    seeded = torch.randn(50)
    torch.manual_seed(0)
    assert torch.equal(seeded, torch.randn(50)), "the twin, a framework's generator, repeats itself"


def test_a_forked_child_has_a_stream_of_its_own() -> None:
    generator = Csprng()
    generator.uint64(4)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, generator.uint64(4).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reader, 32)
    os.close(reader), os.close(writer)
    assert theirs != generator.uint64(4).tobytes()


def _counts_noise() -> bytes:
    return discrete_gaussian(ExactCounts(np.zeros(8, np.int64), 1), 1e9).array.tobytes()


def test_forked_children_have_count_noise_of_their_own() -> None:
    """OpenDP draws from the operating system; a copied generator state would repeat itself in every child."""
    _counts_noise()
    reader, writer = os.pipe()
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            os.write(writer, _counts_noise())
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    drawn = os.read(reader, 4 * 64)
    os.close(reader), os.close(writer)
    assert len({drawn[i : i + 64] for i in range(0, len(drawn), 64)} | {_counts_noise()}) == 5


def test_processes_of_two_sites_with_equal_seeds_draw_different_noise() -> None:
    code = (
        "import random, numpy as np\n"
        "random.seed(7), np.random.seed(7)\n"
        "from common.privacy.noise import *\n"
        "from common.privacy.values import ExactCounts\n"
        "print(discrete_gaussian(ExactCounts(np.zeros(4, np.int64), 1), 1e9).array.tolist())\n"
        "lattice = LatticeGaussian(4, max_grad_norm=1.0, noise_multiplier=1.0, randomness=Csprng())\n"
        "print(lattice.release(1.0).array.tolist(), Csprng().poisson_sample(200, 0.5).tolist())\n"
        "print(np.random.normal(), random.random())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    said = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    (counts, gradient, seeded), (other_counts, other_gradient, seeded_again) = (text.splitlines() for text in said)
    assert counts != other_counts
    assert gradient != other_gradient
    assert seeded == seeded_again, "the twin, seeded generators, repeat themselves"


def test_poisson_sampling_has_the_planned_rate_and_varies_in_size() -> None:
    generator = Csprng()
    sizes = [generator.poisson_sample(10_000, 0.1).size for _ in range(200)]
    assert abs(np.mean(sizes) - 1000) < 5 * 30 / np.sqrt(200)
    assert 20 < np.std(sizes) < 42, "shuffled batches of fixed size would have no spread"
    assert generator.poisson_sample(10, 1.0).tolist() == list(range(10))
    with pytest.raises(PrivacyError, match=r"sample_rate is 1\.5"):
        generator.poisson_sample(10, 1.5)


def test_below_is_uniform() -> None:
    drawn = Csprng().below(np.full(30_000, 3))
    assert stats.chisquare(np.bincount(drawn, minlength=3)).pvalue > 1e-6


def test_an_array_is_called_noised_by_a_mechanism_only() -> None:
    with pytest.raises(PrivacyError, match="only a noise mechanism"):
        Noised(np.zeros(3), mechanism=object())


def test_noised_values_are_read_only_and_private_ones_do_not_print() -> None:
    value = noised(np.arange(3))
    with pytest.raises(ValueError, match="read-only"):
        value.array[0] = 5
    assert "7" not in repr(ExactCounts(np.array([7, 77]), 1))
    assert post_process(lambda arrays: arrays[0] + 1, [value]).array.tolist() == [1, 2, 3]


def test_post_processing_needs_a_noised_value() -> None:
    """Else an exact array could be called noised by processing nothing."""
    with pytest.raises(PrivacyError, match="at least one"):
        post_process(lambda _: np.arange(3), [])


def test_a_noise_so_small_that_sums_could_overflow_is_refused() -> None:
    with pytest.raises(PrivacyError, match="would not fit"):
        LatticeGaussian(3, max_grad_norm=1.0, noise_multiplier=1e-4, randomness=Csprng())
