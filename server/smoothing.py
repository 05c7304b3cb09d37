"""Noisy votes of one code, denoised by how alike its candidates are: Gaussian-process smoothing. Pure functions.

Candidates that are close to each other are close to the same documents, so a candidate's votes say something about its
neighbours' too, while noise is independent from one candidate to the next. The votes are modelled as

    votes = mean + signal + noise,   signal ~ N(0, s^2 ((1 - r) k(x, x') + r I)),   noise ~ N(0, noise_variance I)

with k a squared-exponential kernel on the candidates' embeddings (Rasmussen & Williams 2006, chapter 2). The noise's
variance is public and exact; what is unknown (s^2, k's length scale, and r, the share of the signal that neighbours
don't have in common) is averaged over a grid, each setting weighted by the marginal likelihood of the noisy votes
(ibid., section 5.2). The grid has "no signal" in it, so votes that are noise alone come out as their mean.

Votes are noised and embeddings of candidates are public: by post-processing all of it costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh

from common.errors import PrivacyError, ProtocolError

Counts = NDArray[np.int64]
Embeddings = NDArray[np.float32]
Smoothed = NDArray[np.float64]

EXACT = 2_000
"""Up to this many candidates the kernel is decomposed as it is: J x J doubles, 32 MB, and 200 MB at the peak. It
takes 2 s per length scale and grows with the cube."""

LANDMARKS = 1_000
"""Above `EXACT` the kernel has this rank (Nystroem: Williams & Seeger 2001). Time then grows with J."""

BLOCK = 2_000
"""Candidates that are looked at together: the low-rank features, ``(J, LANDMARKS)``, never exist as a whole. So what
grows with J is a few float64 copies of the embeddings; the rest stays within 100 MB."""

LENGTH_SCALES = 4
"""In equal ratios from 1/sqrt(2) of the distance of nearest neighbours, where they still have 1/e in common, to the
distance of any two candidates. Starting at the whole distance, or at half of it, removes less of the noise (measured in
5, 16 and 48 dimensions)."""

SIGNALS = np.array([0.0, *np.geomspace(1 / 1024, 4, 7)])
"""s^2 over the variance of the noisy votes."""

OWN_SHARES = np.array([0.0, 0.1])
"""r. Larger ones fit single votes better and the distribution of documents worse (measured likewise)."""

_SMALLEST_EIGENVALUE = 1e-10
"""Of the landmarks' kernel over its largest: what is below is rounding."""


@dataclass(frozen=True)
class Basis:
    """Eigenvectors of the kernel at one length scale. Public, and the same whatever the votes.

    Attributes
    ----------
    eigenvalues
        float64 ``(rank,)``, none negative.
    directions
        What turns a row of features into a row of eigenvectors: ``(rank, rank)``. Without landmarks, the eigenvectors.
    embeddings, landmarks
        ``(J, d)`` and ``(LANDMARKS, d)`` in units of the length scale; None where the kernel is exact.
    """

    eigenvalues: NDArray[np.float64]
    directions: NDArray[np.float64]
    embeddings: NDArray[np.float64] | None = None
    landmarks: NDArray[np.float64] | None = None

    def blocks(self) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        """Rows of eigenvectors, ``(block, rank)``, and which candidates they belong to."""
        if self.embeddings is None or self.landmarks is None:
            yield slice(None), self.directions
            return
        for start in range(0, len(self.embeddings), BLOCK):
            rows = slice(start, start + BLOCK)
            yield rows, _kernel(_squares(self.embeddings[rows], self.landmarks)) @ self.directions


def smoothed(votes: Counts, embeddings: Embeddings, noise_variance: float) -> Smoothed:
    """Posterior mean of one code's votes.

    Parameters
    ----------
    votes
        Noisy votes, summed over sites, int64 ``(J,)``. J may be 0.
    embeddings
        Of the candidates, float32 ``(J, d)``, public. Equal ones are in order.
    noise_variance
        Variance of the noise on one vote count: the sum over the sites that voted of their sigma squared. Public. At 0
        there is nothing to smooth.

    Returns
    -------
    ndarray
        float64 ``(J,)``, finite. May be negative: a weight comes of it by projection, as of votes.

    Raises
    ------
    ProtocolError
        If there isn't one finite embedding per vote.
    PrivacyError
        If the noise has no valid variance.
    """
    if embeddings.ndim != 2 or votes.shape != embeddings.shape[:1] or not embeddings.shape[1]:
        raise ProtocolError(
            f"smoothed: votes {votes.shape}, embeddings {embeddings.shape}; one vector of at least one dimension per "
            "vote is needed"
        )
    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        raise ProtocolError(
            f"smoothed: {np.count_nonzero(~finite)} embeddings, the first of candidate {np.argmin(finite)}, have a "
            "coordinate that is inf or NaN; finite ones are accepted"
        )
    return posterior_mean(votes, bases(embeddings), noise_variance)


def posterior_mean(votes: Counts, over: Iterable[Basis], noise_variance: float) -> Smoothed:
    """As `smoothed`, over bases that are made already: they serve any number of ballots on the same candidates."""
    if not (math.isfinite(noise_variance) and noise_variance >= 0):
        raise PrivacyError(f"noise_variance is {noise_variance!r}; a finite number of at least 0 is accepted")
    counts = votes.astype(np.float64)
    variance = float(counts.var()) if counts.size else 0.0
    if not variance or not noise_variance:
        return counts
    # In units of the votes' own spread nothing over- or underflows, however absurd a ballot.
    centre, spread = float(counts.mean()), math.sqrt(variance)
    noise = min(max(noise_variance / variance, 1e-12), 1e12)
    parts = [_averaged((counts - centre) / spread, basis, noise) for basis in over]
    evidences = np.array([evidence for evidence, _ in parts])
    weights = np.exp(evidences - evidences.max())
    mean: Smoothed = (weights / weights.sum()) @ np.stack([mean for _, mean in parts])
    return centre + spread * mean


def bases(embeddings: Embeddings) -> Iterator[Basis]:
    """Bases of all length scales, one at a time: only one has to be held."""
    if len(embeddings) < 2:
        return
    points = embeddings.astype(np.float64)
    if len(points) <= EXACT:
        landmarks = points
    else:
        # In lexical order of their coordinates: the same ones however the candidates are ordered, and no two alike.
        distinct = np.unique(points, axis=0)
        landmarks = distinct[np.unique(np.linspace(0, len(distinct) - 1, LANDMARKS).round().astype(np.int64))]
    for length in _length_scales(landmarks):
        if landmarks is points:
            eigenvalues, vectors = _eigen(_kernel(_squares(points / length, points / length)))
            yield Basis(eigenvalues, vectors)
        else:
            yield _low_rank(points / length, landmarks / length)


def _low_rank(points: NDArray[np.float64], landmarks: NDArray[np.float64]) -> Basis:
    """Eigenvectors of K_JM K_MM^-1 K_MJ."""
    eigenvalues, vectors = _eigen(_kernel(_squares(landmarks, landmarks)))
    kept = eigenvalues > _SMALLEST_EIGENVALUE * eigenvalues[-1]
    features = Basis(eigenvalues[kept], vectors[:, kept] / np.sqrt(eigenvalues[kept]), points, landmarks)
    products = np.zeros((np.count_nonzero(kept),) * 2)
    for _, rows in features.blocks():
        products += rows.T @ rows
    eigenvalues, vectors = _eigen(products)
    kept = eigenvalues > _SMALLEST_EIGENVALUE * eigenvalues[-1]
    directions = features.directions @ (vectors[:, kept] / np.sqrt(eigenvalues[kept]))
    return Basis(eigenvalues[kept], directions, points, landmarks)


def _averaged(centred: Smoothed, basis: Basis, noise: float) -> tuple[float, Smoothed]:
    """Log evidence of one length scale, and its posterior mean, averaged over s^2 and r."""
    coordinates = np.zeros(basis.eigenvalues.size)
    for rows, vectors in basis.blocks():
        coordinates += vectors.T @ centred[rows]
    signals, shares = (grid.ravel() for grid in np.meshgrid(SIGNALS, OWN_SHARES))
    # What is beyond the kernel's rank varies by the candidates' own share alone.
    own = signals * shares
    signal = np.outer(signals * (1 - shares), basis.eigenvalues) + own[:, None]
    rest = centred.size - coordinates.size
    beyond = max(float(centred @ centred - coordinates @ coordinates), 0.0) if rest else 0.0
    likelihoods = -0.5 * (
        (np.log(signal + noise) + coordinates**2 / (signal + noise)).sum(axis=1)
        + rest * np.log(own + noise)
        + beyond / (own + noise)
    )
    highest = float(likelihoods.max())
    weights = np.exp(likelihoods - highest)
    evidence = highest + float(np.log(weights.sum()))
    weights /= weights.sum()
    kept_beyond = float(weights @ (own / (own + noise)))
    kept = weights @ (signal / (signal + noise)) - kept_beyond
    mean = kept_beyond * centred
    for rows, vectors in basis.blocks():
        mean[rows] += vectors @ (kept * coordinates)
    return evidence, mean


def _length_scales(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Equal embeddings have no say in it; if all are equal, any length will do."""
    distances = np.sqrt(_squares(points, points))
    np.fill_diagonal(distances, 0)
    apart = np.where(distances > 1e-6 * distances.max(initial=0), distances, np.inf)
    nearest = apart.min(axis=1)
    if not np.isfinite(nearest).any():
        return np.ones(1)
    shortest = np.median(nearest[np.isfinite(nearest)]) / math.sqrt(2)
    return np.geomspace(shortest, max(np.median(apart[np.isfinite(apart)]), shortest), LENGTH_SCALES)


def _squares(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squared distances, ``(left, right)``."""
    products = left @ right.T
    products *= -2
    products += (left * left).sum(axis=1)[:, None]
    products += (right * right).sum(axis=1)
    return np.maximum(products, 0, out=products)


def _kernel(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    squares /= -2
    return np.exp(squares, out=squares)


def _eigen(matrix: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Ascending. Rounding may leave a singular kernel's eigenvalues a little below 0."""
    eigenvalues, vectors = eigh(matrix, driver="evd", overwrite_a=True, check_finite=False)
    return np.maximum(eigenvalues, 0), vectors
