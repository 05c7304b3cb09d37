"""Selection rules on real text: NHS comments vote, in 8 hospitals, on what a generator wrote that saw 3 of 9 topics.

Pools of 2.5 and of 10 times the corpus of 1,200 texts; see `real_pool`. K is the project's own for the pool. Judged are

    accuracy, macro-F1    of a topic classifier on MiniLM's vectors, taught on the selection, on comments nobody saw
    distance              Fréchet, of MiniLM's vectors, to the comments that voted
    unseen, tf-idf        the same distance to comments nobody saw; macro-F1 of a classifier of words, as another judge

MiniLM's vectors also decide the votes, which a rule could turn to its account; tf-idf is there for that. Where a rule
leaves a shortfall, fresh texts of the code fill it, as in a study. Means over draws of noise and of texts. Noise can't
be given a seed, so a last digit varies from run to run.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import client_weak.neighbours
import server.aggregate
import server.density
import server.smoothing
from client_weak.neighbours import comparable, nearest_candidates
from common.models.embedder import load_embedder
from common.privacy.accounting import plan_weak
from common.privacy.bounding import profile_counts, vote_counts
from common.privacy.noise import discrete_gaussian
from common.study import Voting
from server.aggregate import SELECTION_RULES, Embedded, combined_sizes, fresh_wanted, quotas, select
from server.evaluation.utility import tfidf_predictions, vector_predictions
from tests.benchmarks import real_pool
from tests.benchmarks.bars import Bar
from tests.benchmarks.figures import Figures
from tests.benchmarks.real_pool import COMMENTS, LARGE, SMALL, RealPool, Texts

TEXTS, HOSPITALS, DELTA, DRAWS, CHOICE = 1_200, 8, 1e-5, 5, 2.5
EPSILONS = (8.0, 1.0)
NUMBERS = ("accuracy", "macro-F1", "distance", "unseen", "tf-idf", "distinct")


@dataclass(frozen=True)
class Votes:
    """Summed noisy ballots and profiles, and the variance of the noise on a vote."""

    ballots: NDArray[np.int64]
    units: NDArray[np.int64]
    variance: float


def run() -> Iterator[Bar]:
    """Measure every cell that isn't in the figures' file yet, print the tables, hold the bars."""
    if not COMMENTS.is_file():
        sys.exit("selection-real: the comments aren't beside this checkout (shared/data)")
    modules = (client_weak.neighbours, server.aggregate, server.density, server.smoothing, real_pool)
    figures = Figures("selection-real", (*modules, sys.modules[__name__]), f"{TEXTS} {HOSPITALS} {DRAWS}")
    world = RealPool()
    cells = [(SMALL, 8.0, "minilm"), (LARGE, 8.0, "minilm"), (SMALL, 1.0, "minilm"), (LARGE, 1.0, "minilm"),
             (SMALL, 8.0, "wordllama")]  # fmt: skip
    found = {}
    for size, epsilon, embedder in cells:
        setting = {"pool": str(size), "epsilon": f"{epsilon:g}", "embedder": embedder}
        if not figures.find("cell", **setting):
            figures.add("cell", setting, **_cell(world, size, epsilon, embedder))
        found[size, epsilon, embedder] = figures.find("cell", **setting)[0]
        _print(setting, found[size, epsilon, embedder])
    for size in (SMALL, LARGE):
        cell = found[size, 8.0, "minilm"]
        better = cell["density"]["macro-F1"] - cell["paper"]["macro-F1"]
        yield Bar(f"selection-real-{size}-macro-f1-over-papers", better, 0.01, at_least=True)
        yield Bar(
            f"selection-real-{size}-distance-over-uniform",
            cell["density"]["distance"] / cell["uniform"]["distance"], 1.05,
        )  # fmt: skip


def _print(setting: dict[str, str], cell: dict[str, dict[str, float]]) -> None:
    print(f"\npool {setting['pool']}, epsilon {setting['epsilon']}, votes by {setting['embedder']}: {TEXTS} texts")
    print(f"{'':18}" + "".join(f"{name:>11}" for name in NUMBERS))
    for rule, numbers in cell.items():
        if isinstance(numbers, dict) and "accuracy" in numbers:
            print(f"{rule:18}" + "".join(f"{numbers[name]:>11.3f}" for name in NUMBERS), flush=True)


def _cell(world: RealPool, size: int, epsilon: float, embedder: str) -> dict[str, dict[str, float]]:
    codes = len(world.study.codes)
    rows = world.rows_of(size)
    pool, spare = world.pool[rows], np.setdiff1d(np.arange(LARGE), rows)
    neighbours = min(8, max(1, size // (10 * codes)))
    vectors, own = world.pool.vectors, world.voters.vectors
    if embedder != "minilm":
        model = load_embedder(Voting(embedder=embedder))
        vectors, own = model.embed(world.pool.texts), model.embed(world.voters.texts)
    compared = comparable(own, vectors[rows], "cosine")
    nearest = nearest_candidates(compared[0], world.voters.codes, compared[1], pool.codes, neighbours=neighbours)
    rules = [(rule, "none") for rule in SELECTION_RULES] + [("simplex", "kernel"), ("density", "kernel")]
    sums = {_name(*rule): np.zeros(len(NUMBERS)) for rule in rules}
    for draw in range(DRAWS):
        votes = _voted(world, nearest, pool, neighbours, epsilon, draw)
        wanted = quotas(votes.units, TEXTS)
        # Fresh texts are the pool's own that weren't voted on: written by the same model under the same code.
        offered = _first(world.pool, spare, fresh_wanted(wanted, np.bincount(pool.codes, minlength=codes), CHOICE))
        for rule, smoothing in rules:
            selection = select(
                rule, votes=votes.ballots, codes_of_candidates=pool.codes, quotas=wanted,
                expected=neighbours * np.maximum(votes.units, 1.0), generator=np.random.default_rng(draw),
                smoothing=smoothing, embeddings=vectors[rows], noise_variance=votes.variance, neighbours=neighbours,
                fresh=Embedded(world.pool.codes[offered], vectors[offered]) if rule == "density" else None,
            )  # fmt: skip
            topped_up = _first(world.pool, spare, selection.shortfall)
            chosen = np.concatenate([rows[selection.chosen], offered[selection.fresh], topped_up])
            sums[_name(rule, smoothing)] += _judged(world, world.pool[chosen], chosen)
    return {rule: dict(zip(NUMBERS, (total / DRAWS).tolist(), strict=True)) for rule, total in sums.items()}


def _name(rule: str, smoothing: str) -> str:
    return rule if smoothing == "none" else f"{rule}, {smoothing}"


def _voted(
    world: RealPool, nearest: NDArray[np.int64], pool: Texts, neighbours: int, epsilon: float, draw: int
) -> Votes:
    """What the hospitals' noisy ballots and profiles sum to."""
    codes, candidates = len(world.study.codes), len(pool.texts)
    hospital = np.random.default_rng(draw).integers(HOSPITALS, size=len(nearest))
    plan = plan_weak(epsilon, DELTA, votes_per_unit=neighbours, profile_share=0.02, codes_per_unit=1)
    ballots, profile = np.zeros(candidates, np.int64), np.zeros(codes, np.int64)
    for own in (hospital == index for index in range(HOSPITALS)):
        units = np.arange(own.sum(), dtype=np.int32)
        exact = vote_counts(nearest[own], units, candidates=candidates, votes_per_unit=neighbours)
        of_codes = profile_counts(world.voters.codes[own], units, number_of_codes=codes, codes_per_unit=1)
        ballots += discrete_gaussian(exact, plan.votes.scale).array
        profile += discrete_gaussian(of_codes, plan.profile.scale).array
    units = combined_sizes(
        profile, ballots, pool.codes, votes_per_unit=neighbours,
        profile_variance=HOSPITALS * plan.profile.scale**2, vote_variance=HOSPITALS * plan.votes.scale**2,
    )  # fmt: skip
    return Votes(ballots, units, HOSPITALS * plan.votes.scale**2)


def _first(pool: Texts, among: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first so many texts of each code."""
    of = pool.codes[among]
    return np.concatenate([among[of == code][:count] for code, count in enumerate(wanted)]).astype(np.int64)


def _judged(world: RealPool, selected: Texts, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    from sklearn.metrics import accuracy_score, f1_score

    tones = len(world.tones)
    topics, true = ([str(code // tones) for code in texts.codes] for texts in (selected, world.test))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_vectors = vector_predictions(selected.vectors, topics, world.test.vectors)
        by_words = tfidf_predictions(selected.texts, topics, world.test.texts)
    distances = [_frechet(selected.vectors, real.vectors) for real in (world.voters, world.test)]
    f1 = [f1_score(true, found, average="macro", zero_division=0) for found in (by_vectors, by_words)]
    return np.array([accuracy_score(true, by_vectors), f1[0], *distances, f1[1], np.unique(rows).size])


def _frechet(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """With plain covariances, as in the facts' table; the evaluation's own shrinks them."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    of_a, of_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    values, axes = np.linalg.eigh(of_a)
    root = (axes * np.sqrt(np.maximum(values, 0))) @ axes.T
    shared = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ of_b @ root), 0)).sum()
    return float(((a.mean(axis=0) - b.mean(axis=0)) ** 2).sum() + np.trace(of_a) + np.trace(of_b) - 2 * shared)
