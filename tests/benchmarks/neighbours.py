"""The nearest-neighbour stage of a vote against the bare matrix products of the same shapes.

15,000 documents and 5,000 candidates of 256 dimensions (the static embedder's) and 384 (MiniLM's), under one code, five
and nine. The bare product is what a user would write: float32, a code at a time, in blocks as large as the stage's, and
nothing is looked for in it. Both take turns in one process; ratios are taken within a turn, of CPU seconds. Vectors are
random: neighbours of real text are nearer to each other, and more of them have to be told apart exactly.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from client_weak import neighbours as module
from client_weak.neighbours import Vectors, comparable, nearest_candidates
from tests.benchmarks.bars import Bar

DOCUMENTS, CANDIDATES, NEIGHBOURS, TURNS, LIMIT = 15_000, 5_000, 8, 7, 1.5
SHAPES = tuple((dimensions, codes) for dimensions in (256, 384) for codes in (1, 5, 9))


def run() -> Iterator[Bar]:
    """Measure every shape, print the table, hold the bars."""
    print(f"\n{DOCUMENTS} documents x {CANDIDATES} candidates, K = {NEIGHBOURS}, medians of {TURNS} turns")
    print(f"{'dimensions':>10} {'codes':>6} {'bare CPU s':>11} {'stage CPU s':>12} {'x bare':>7}")
    for dimensions, codes in SHAPES:
        bare, stage, ratio = _measured(dimensions, codes)
        print(f"{dimensions:>10} {codes:>6} {bare:>11.3f} {stage:>12.3f} {ratio:>7.2f}", flush=True)
        yield Bar(f"neighbours-{dimensions}-dimensions-{codes}-codes", ratio, LIMIT)


def _measured(dimensions: int, codes: int) -> tuple[float, float, float]:
    random = np.random.default_rng(dimensions + codes)
    documents, candidates = comparable(
        random.normal(size=(DOCUMENTS, dimensions)).astype(np.float32),
        random.normal(size=(CANDIDATES, dimensions)).astype(np.float32),
        "cosine",
    )
    own, others = random.integers(0, codes, DOCUMENTS), random.integers(0, codes, CANDIDATES)
    turns = []
    for _ in range(TURNS):
        bare = _seconds(lambda: _bare(documents, own, candidates, others, codes))
        stage = _seconds(lambda: nearest_candidates(documents, own, candidates, others, neighbours=NEIGHBOURS))
        turns.append((bare, stage, stage / bare))
    bare, stage, ratio = (statistics.median(values) for values in zip(*turns, strict=True))
    return bare, stage, ratio


def _bare(documents: Vectors, own: np.ndarray, candidates: Vectors, others: np.ndarray, codes: int) -> None:
    for code in range(codes):
        rows, columns = documents[own == code], candidates[others == code]
        step = max(1, module.BLOCK // len(columns))
        for start in range(0, len(rows), step):
            rows[start : start + step] @ columns.T


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
