"""Noise and sampling. All randomness comes from the operating system; nothing here can be given a seed.

Two mechanisms exist. Counts get a discrete Gaussian (OpenDP's exact sampler). Sums of gradients get a Gaussian on an
integer lattice (`LatticeGaussian`): units are clipped, cut to the lattice one by one, summed exactly in int64, and the
noise is added as integers too, so no floating point addition ever mixes private values with noise.
"""

from __future__ import annotations

import math
import os

import numpy as np
import opendp.prelude as opendp
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray
from scipy.special import ndtri

from common.errors import PrivacyError
from common.privacy.values import ExactCounts, Noised, noised

opendp.enable_features("contrib")

LATTICE_BITS = 30
"""The lattice's cell is the noise's standard deviation times 2^-30: far below the noise, far inside int64."""

SMALLEST_MULTIPLIER = 2.0**-10
"""Then a coordinate of one unit is at most 2^40 cells, and a sum of eight million units fits into int64."""

_BLOCK = 1 << 15
"""Coordinates that are worked on at once: they stay in a core's cache, which makes noise and sums 2 to 3 x faster."""

_CLIP_SLACK = 1 - 1e-12
"""Float64 rounding of the clip factor may not push a unit's norm above C."""


class Csprng:
    """AES-256-CTR keystream keyed by the operating system; re-keyed in a forked child, never seeded.

    Two generators, two processes and two sites never share a stream, whatever seeds a framework was given.
    """

    def __init__(self) -> None:
        self._rekey()

    def _rekey(self) -> None:
        self._pid = os.getpid()
        cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16)))
        self._stream: CipherContext = cipher.encryptor()

    def uint64(self, size: int) -> NDArray[np.uint64]:
        """``size`` independent uniform 64-bit words."""
        if self._pid != os.getpid():
            self._rekey()
        return np.frombuffer(self._stream.update(bytes(8 * size)), dtype=np.uint64)

    def uniform(self, size: int) -> NDArray[np.float64]:
        """Uniform in the open interval (0, 1), on the centres of 2^53 cells."""
        return ((self.uint64(size) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def normal(self, size: int) -> NDArray[np.float64]:
        """Standard normals in float64.

        Each is the sum of four draws over 2 (Holohan & Braghin 2021): the gaps that a single inverse-CDF draw leaves
        between representable values, which betray the unnoised value, are filled many times over.
        """
        drawn = np.empty(size)
        for start in range(0, size, _BLOCK):
            block = drawn[start : start + _BLOCK]
            uniform = self.uniform(4 * block.size)
            ndtri(uniform, out=uniform)
            np.divide(uniform.reshape(4, block.size).sum(axis=0), 2, out=block)
        return drawn

    def poisson_sample(self, units: int, sample_rate: float) -> NDArray[np.int64]:
        """Indices of a Poisson sample: each of ``units`` is in it with probability q, independently.

        q is rounded down to a multiple of 2^-64, so the real rate never exceeds the accounted one.
        """
        if not 0 < sample_rate <= 1:
            raise PrivacyError(f"sample_rate is {sample_rate!r}; a number above 0 and at most 1 is accepted")
        if sample_rate == 1:
            return np.arange(units, dtype=np.int64)
        return np.nonzero(self.uint64(units) < np.uint64(int(sample_rate * 2**64)))[0]

    def below(self, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """One uniform integer in ``[0, bound)`` for each bound."""
        drawn = np.floor(self.uniform(bounds.size) * bounds).astype(np.int64)
        return np.minimum(drawn, bounds - 1)


def discrete_gaussian(counts: ExactCounts, scale: float) -> Noised:
    """Add discrete Gaussian noise to private counts.

    Parameters
    ----------
    counts
        Private; one unit moves at most ``counts.cells_per_unit`` cells by 1, so the L2 sensitivity is its square root.
    scale
        Sigma of the noise in counts, from `common.privacy.accounting`.

    Returns
    -------
    Noised
        int64, same shape.
    """
    if not scale > 0:
        raise PrivacyError(f"scale is {scale!r}; a number above 0 is accepted")
    if not counts.counts.size:
        return noised(counts.counts)
    mechanism = opendp.m.make_gaussian(
        opendp.vector_domain(opendp.atom_domain(T="i64")), opendp.l2_distance(T=float), scale=float(scale)
    )
    return noised(np.asarray(mechanism(counts.counts.tolist()), dtype=np.int64))


class LatticeGaussian:
    """One Gaussian mechanism on a sum of unit gradients (one DP-SGD step).

    Sensitivity. A unit's gradient is scaled to norm <= C and every coordinate is cut towards zero to the lattice, which
    can only shorten it; so adding or removing a unit moves the integer sum by a vector of norm <= C, exactly, however
    the batch was split into chunks. The noise is ``round(N(0, (sigma C)^2) / cell)``; as the sum S is an integer
    vector, ``S + round(N) = round(S + N)``: post-processing of the Gaussian mechanism.

    What remains is the finite precision of the normal draw itself, and of the model's arithmetic: a unit's gradient
    may differ in its last bits with the padding of its chunk.

    Parameters
    ----------
    dimension
        d, number of trained parameters.
    max_grad_norm
        C. Public.
    noise_multiplier
        sigma: standard deviation divided by C. Public.
    """

    def __init__(self, dimension: int, *, max_grad_norm: float, noise_multiplier: float, randomness: Csprng) -> None:
        if not (max_grad_norm > 0 and noise_multiplier > 0):
            raise PrivacyError(
                f"max_grad_norm is {max_grad_norm!r} and noise_multiplier {noise_multiplier!r}; numbers above 0 are "
                "accepted"
            )
        if noise_multiplier < SMALLEST_MULTIPLIER:
            raise PrivacyError(
                f"noise_multiplier is {noise_multiplier!r}; at least {SMALLEST_MULTIPLIER:g} is accepted, as below it "
                "a sum of many units would not fit into the lattice's integers"
            )
        self._max_grad_norm = max_grad_norm
        self._deviation = noise_multiplier * max_grad_norm
        self._cell = self._deviation * 2.0**-LATTICE_BITS
        self._randomness = randomness
        self._sum = np.zeros(dimension, dtype=np.int64)
        self._released = False

    def add(self, gradient: NDArray[np.floating]) -> None:
        """Add one unit's gradient, float32 or float64 of shape ``(d,)``, private. A non-finite one counts as zero.

        Raises
        ------
        PrivacyError
            If the shape is another one.
        """
        if gradient.shape != self._sum.shape:
            raise PrivacyError(f"LatticeGaussian.add: shape {gradient.shape}; {self._sum.shape} is accepted")
        blocks = [slice(start, start + _BLOCK) for start in range(0, self._sum.size, _BLOCK)]
        squares = sum(float(np.square(gradient[block], dtype=np.float64).sum()) for block in blocks)
        norm = math.sqrt(squares) if math.isfinite(squares) else math.inf
        if not math.isfinite(norm):
            # One inf would turn the whole release into NaN and so reveal that its unit was there.
            return
        factor = min(1.0, self._max_grad_norm / norm) * _CLIP_SLACK if norm > 0 else 0.0
        for block in blocks:
            # A cast to integers cuts towards zero.
            self._sum[block] += np.multiply(gradient[block], factor / self._cell, dtype=np.float64).astype(np.int64)

    def release(self, normaliser: float) -> Noised:
        """Add the noise, once, and divide by ``normaliser``, a public constant.

        Returns
        -------
        Noised
            float64 of shape ``(d,)``. With no unit added it is noise only: an empty batch is a step like any other.

        Raises
        ------
        PrivacyError
            On a second call: the same sum may not be released twice.
        """
        if self._released:
            raise PrivacyError("LatticeGaussian.release: called twice; one sum is released once")
        self._released = True
        noise = np.rint(self._randomness.normal(self._sum.size) * (self._deviation / self._cell)).astype(np.int64)
        return noised((self._sum + noise).astype(np.float64) * (self._cell / normaliser))
