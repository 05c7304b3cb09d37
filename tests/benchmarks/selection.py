"""What selection makes of noisy votes: energy distance of the weighted candidates to the records that voted.

Twenty hospitals of 2,000 records, ten codes. A code has four sub-clusters; hospitals differ in their codes and
in their mix of sub-clusters. Half of a code's candidates come from its sub-clusters, the others from a wide cloud
around its centre. Points are 16-dimensional, and records vote for what is at the least Euclidean distance.

Votes, bounding, accounting, noise, weights and smoothing are the project's own. Each hospital's noisy ballot is turned
into weights on its own, as in the facts' table, and its profile's noise enters through the projection's total:

    clip       clip at 0 (RAFT)
    soft t     soft threshold: t standard deviations of the noise are taken off first
    simplex    projection per code, which the default rule begins with, too
    kernel     smoothed votes, then simplex

Noise can't be given a seed, so a table's last digit varies from run to run; candidates and records don't.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

import client_weak.neighbours
import common.privacy.accounting
import common.privacy.bounding
import common.privacy.noise
import server.aggregate
import server.smoothing
from client_weak.neighbours import comparable, nearest_candidates
from common.privacy.accounting import plan_weak
from common.privacy.bounding import profile_counts, vote_counts
from common.privacy.noise import discrete_gaussian
from server.aggregate import clipped_weights, simplex_weights
from server.smoothing import Basis, bases, posterior_mean
from tests.benchmarks.bars import Bar
from tests.benchmarks.figures import Figures

Vectors = NDArray[np.float64]
Votes = NDArray[np.int64]

HOSPITALS, RECORDS, CODES, CLUSTERS, DIMENSIONS = 20, 2000, 10, 4, 16
DELTA, PROFILE_SHARE, SEED = 1 / RECORDS, 0.02, 0
VOTES_PER_RECORD = (1, 2, 4, 8, 16)
TABLES = ((1.0, 5000), (4.0, 5000), (8.0, 5000), (1.0, 1000))
"""epsilon and candidates in the pool."""

FACTS = {
    (1.0, 5000): {
        "clip": (0.565, 0.464, 0.374, 0.299, 0.240),
        "soft 1": (0.319, 0.251, 0.195, 0.159, 0.132),
        "soft 2": (0.455, 0.378, 0.290, 0.257, 0.216),
        "soft 3": (1.200, 0.900, 0.643, 0.529, 0.457),
        "simplex": (0.325, 0.261, 0.205, 0.174, 0.151),
        "kernel": (0.283, 0.222, 0.172, 0.142, 0.121),
    },
    (4.0, 5000): {
        "clip": (0.272, 0.211, 0.169, 0.135, 0.114),
        "soft 1": (0.152, 0.128, 0.109, 0.093, 0.083),
        "simplex": (0.147, 0.126, 0.108, 0.095, 0.086),
        "kernel": (0.148, 0.123, 0.104, 0.090, 0.082),
    },
    (8.0, 5000): {
        "clip": (0.187, 0.150, 0.124, 0.104, 0.092),
        "soft 1": (0.123, 0.109, 0.096, 0.084, 0.076),
        "simplex": (0.117, 0.104, 0.093, 0.083, 0.078),
        "kernel": (0.119, 0.105, 0.092, 0.082, 0.076),
    },
    (1.0, 1000): {"clip": (0.391, 0.329, 0.283, 0.257, 0.307), "simplex": (0.408, 0.332, 0.281, 0.254, 0.296)},
}
"""What an earlier simulation gave, with votes and noise of its own: printed beside ours."""


@dataclass(frozen=True)
class Code:
    """One code's candidates, and what every hospital's energy distance on them needs.

    Attributes
    ----------
    candidates
        ``(J, DIMENSIONS)``.
    among
        Distances among candidates, ``(J, J)``.
    kernel
        Of the smoothing.
    to_records
        Per hospital, mean distance of each candidate to its records, ``(J,)``, and among the records themselves.
    """

    candidates: Vectors
    among: Vectors
    kernel: list[Basis]
    to_records: list[tuple[Vectors, float]]

    def energy(self, hospital: int, weights: Vectors) -> float:
        """2 E|X - Y| - E|X - X'| - E|Y - Y'| of records X and weighted candidates Y."""
        to_candidates, among_records = self.to_records[hospital]
        return float(2 * weights @ to_candidates - weights @ self.among @ weights - among_records)


@dataclass(frozen=True)
class World:
    """Candidates and hospitals; ``code_of_record`` and ``nearest`` have one array per hospital."""

    codes: list[Code]
    code_of_candidate: NDArray[np.int32]
    code_of_record: list[NDArray[np.int32]]
    nearest: list[Votes]


def run() -> Iterator[Bar]:
    """Simulate every cell that isn't in the figures' file yet, print the tables, hold the bars."""
    modules = (
        *(client_weak.neighbours, common.privacy.accounting, common.privacy.bounding, common.privacy.noise),
        *(server.aggregate, server.smoothing, sys.modules[__name__]),
    )
    figures = Figures("selection", modules, f"{HOSPITALS}x{RECORDS}")
    cells = {}
    for epsilon, pool in TABLES:
        for votes in VOTES_PER_RECORD:
            setting = {"epsilon": f"{epsilon:g}", "candidates": str(pool), "votes": str(votes)}
            if not figures.find("energy", **setting):
                figures.add("energy", setting, **_cell(epsilon, pool, votes))
            cells[epsilon, pool, votes] = figures.find("energy", **setting)[0]
    for epsilon, pool in TABLES:
        _print_table(epsilon, pool, [cells[epsilon, pool, votes] for votes in VOTES_PER_RECORD])
    sparse, dense = cells[1.0, 5000, 8], cells[1.0, 1000, 8]
    yield Bar("selection-clip-over-simplex", sparse["clip"] / sparse["simplex"], 1.3, at_least=True)
    yield Bar("selection-soft-3-over-simplex", sparse["soft 3"] / sparse["simplex"], 1.0, at_least=True)
    yield Bar("selection-kernel-over-simplex", sparse["kernel"] / sparse["simplex"], 0.95)
    yield Bar("selection-dense-clip-from-simplex", abs(dense["clip"] / dense["simplex"] - 1), 0.1)


def _print_table(epsilon: float, pool: int, cells: list[dict[str, float]]) -> None:
    print(f"\nepsilon {epsilon:g}, {pool} candidates, {CODES} codes: energy distance (facts')")
    print(f"{'K':10}" + "".join(f"{votes:>16}" for votes in VOTES_PER_RECORD))
    facts = FACTS[epsilon, pool]
    for name in ("uniform", "noiseless", *METHODS):
        known = [f"({value:.3f})" for value in facts[name]] if name in facts else [""] * len(cells)
        row = (f"{cell[name]:>8.3f} {fact:<7}" for cell, fact in zip(cells, known, strict=True))
        print(f"{name:10}" + "".join(row))


def _cell(epsilon: float, pool: int, votes_per_record: int) -> dict[str, float]:
    """Energy distance by method: mean over hospitals and codes, weighted by records."""
    world = _world(pool)
    plan = plan_weak(
        epsilon, DELTA, votes_per_unit=votes_per_record, profile_share=PROFILE_SHARE, codes_per_unit=1
    )  # fmt: skip
    sums, weight = dict.fromkeys(("uniform", "noiseless", *METHODS), 0.0), 0
    for hospital in range(HOSPITALS):
        units = np.arange(RECORDS, dtype=np.int32)
        exact = vote_counts(
            world.nearest[hospital][:, :votes_per_record], units, candidates=pool, votes_per_unit=votes_per_record
        )
        of_codes = profile_counts(world.code_of_record[hospital], units, number_of_codes=CODES, codes_per_unit=1)
        ballot = discrete_gaussian(exact, plan.votes.scale).array
        profile = discrete_gaussian(of_codes, plan.profile.scale).array
        for index, code in enumerate(world.codes):
            own, records = world.code_of_candidate == index, int(of_codes.counts[index])
            if records < 2:
                continue
            noisy = Noisy(ballot[own], votes_per_record * max(int(profile[index]), 1), plan.votes.scale, code.kernel)
            weights = {name: method(noisy) for name, method in METHODS.items()}
            weights["uniform"] = np.full(noisy.votes.size, 1 / noisy.votes.size)
            weights["noiseless"] = clipped_weights(exact.counts[own])
            for name, given in weights.items():
                sums[name] += records * code.energy(hospital, given)
            weight += records
    return {name: total / weight for name, total in sums.items()}


@dataclass(frozen=True)
class Noisy:
    """One hospital's released votes on one code's candidates, and what is public about them."""

    votes: Votes
    total: float
    scale: float
    kernel: list[Basis]


def _soft(threshold: float) -> Callable[[Noisy], Vectors]:
    def weights(noisy: Noisy) -> Vectors:
        return clipped_weights(noisy.votes - threshold * noisy.scale)

    return weights


METHODS: dict[str, Callable[[Noisy], Vectors]] = {
    "clip": lambda noisy: clipped_weights(noisy.votes),
    "soft 1": _soft(1),
    "soft 2": _soft(2),
    "soft 3": _soft(3),
    "simplex": lambda noisy: simplex_weights(noisy.votes, noisy.total),
    "kernel": lambda noisy: simplex_weights(posterior_mean(noisy.votes, noisy.kernel, noisy.scale**2), noisy.total),
}


@cache
def _world(pool: int) -> World:
    generator = np.random.default_rng(SEED)
    centres = generator.normal(0, 2.0, (CODES, DIMENSIONS))
    clusters = centres[:, None] + generator.normal(0, 1.0, (CODES, CLUSTERS, DIMENSIONS))
    codes, records = list[NDArray[np.int32]](), list[Vectors]()
    for _ in range(HOSPITALS):
        code = np.sort(generator.choice(CODES, RECORDS, p=generator.dirichlet(np.ones(CODES)))).astype(np.int32)
        mixes = generator.dirichlet(np.full(CLUSTERS, 0.5), CODES)
        cluster = (generator.random((RECORDS, 1)) > mixes[code].cumsum(axis=1)[:, :-1]).sum(axis=1)
        codes.append(code)
        records.append(clusters[code, cluster] + generator.normal(0, 0.6, (RECORDS, DIMENSIONS)))
    of_candidate = np.repeat(np.arange(CODES, dtype=np.int32), pool // CODES)
    near = clusters[of_candidate, generator.integers(CLUSTERS, size=pool)]
    near += generator.normal(0, 0.8, (pool, DIMENSIONS))
    wide = centres[of_candidate] + generator.normal(0, 1.5, (pool, DIMENSIONS))
    candidates = np.where(generator.random((pool, 1)) < 0.5, near, wide)
    vectors = candidates.astype(np.float32)
    nearest = []
    for own, code in zip(records, codes, strict=True):
        compared = comparable(own.astype(np.float32), vectors, "l2")
        nearest.append(
            nearest_candidates(compared[0], code, compared[1], of_candidate, neighbours=max(VOTES_PER_RECORD))
        )
    made = []
    for index in range(CODES):
        own = candidates[of_candidate == index]
        theirs = [record[code == index] for record, code in zip(records, codes, strict=True)]
        to_records = [(_distances(own, x).mean(axis=1), float(_distances(x, x).mean())) if len(x) else (own[:, 0], 0.0)
                      for x in theirs]  # fmt: skip
        kernel = list(bases(vectors[of_candidate == index]))
        made.append(Code(own, _distances(own, own), kernel, to_records))
    return World(made, of_candidate, codes, nearest)


def _distances(left: Vectors, right: Vectors) -> Vectors:
    squares = (left * left).sum(axis=1)[:, None] + (right * right).sum(axis=1) - 2 * left @ right.T
    return np.sqrt(np.maximum(squares, 0))
