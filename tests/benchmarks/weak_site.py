"""One weak site's answer with the time of its stages, in a hospital's own environment: ``python weak_site.py FOLDER``.

The folder holds ``study.json``, ``site.toml`` and ``pool.jsonl``. Run as a file, so that what is installed there is
used and no checkout; it prints one line of JSON. The answer is the real one, through the app, the door and the ledger;
stages are timed by wrapping the functions that the app calls.
"""

from __future__ import annotations

import time

START = time.perf_counter(), time.process_time()

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import client_weak.client_app
import client_weak.votes
from common.client_app import app
from common.protocol import PROFILE_AND_VOTE, CandidatePool, VoteRequest
from common.site.documents import Documents
from common.site.ledger import Ledger
from common.study import Study

STAGES: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])


def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its wall and CPU seconds added to a stage."""

    def run(*args: Any, **options: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return function(*args, **options)
        finally:
            STAGES[stage][0] += time.perf_counter() - wall
            STAGES[stage][1] += time.process_time() - cpu

    return run


def wrap(module: Any, name: str, stage: str) -> None:
    """Time a function of a module."""
    setattr(module, name, timed(stage, getattr(module, name)))


def loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """Have every call of the loaded embedder timed."""

    def run(*args: Any, **options: Any) -> Any:
        embedder = load(*args, **options)
        kind = type(embedder)
        kind.embed = timed("embedding", kind.embed)
        return embedder

    return timed("loading the embedder", run)


def main(folder: Path) -> None:
    """Answer, and print what it took."""
    imports = time.perf_counter() - START[0], time.process_time() - START[1]
    study = Study.from_canonical((folder / "study.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (folder / "pool.jsonl").read_text(encoding="utf-8").splitlines()]
    pool = CandidatePool(tuple(row["text"] for row in rows), np.array([row["code"] for row in rows], dtype=np.int32))
    # Who a message is from, as the process that Flower starts for one has it.
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(VoteRequest(study, "run", pool).to_records(), dst_node_id=1, message_type=PROFILE_AND_VOTE)

    wrap(client_weak.votes, "comparable", "neighbours")
    wrap(client_weak.votes, "nearest_candidates", "neighbours")
    wrap(client_weak.votes, "vote_counts", "bounding")
    wrap(client_weak.votes, "discrete_gaussian", "noise")
    wrap(client_weak.client_app, "noisy_profile", "profile")
    client_weak.client_app.load_embedder = loading(client_weak.client_app.load_embedder)
    Documents.load = timed("reading documents", Documents.load)  # type: ignore[method-assign]
    Ledger.reserve = timed("ledger", Ledger.reserve)  # type: ignore[method-assign]
    Ledger.store = timed("ledger", Ledger.store)  # type: ignore[method-assign]

    wall, cpu = time.perf_counter(), time.process_time()
    reply = app(message, Context(1, 1, {"site": str(folder / "site.toml")}, RecordDict(), {}))
    whole = time.perf_counter() - wall, time.process_time() - cpu
    if reply.has_error():
        sys.exit(f"weak_site: the site refused: {reply.error.code} {reply.error.reason}")
    rest = [whole[i] - sum(stage[i] for stage in STAGES.values()) for i in range(2)]
    print(
        json.dumps(
            {
                "stages": {"imports": imports, **STAGES, "planning, policy and the rest": rest},
                "seconds": imports[0] + whole[0],
                "peak_mb": _peak_mb(),
                "torch": "torch" in sys.modules,
            }
        )
    )


def _peak_mb() -> float:
    """Of this process' own memory: `resource` would count what the one that started it had, too."""
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return int(told["VmHWM"].split()[0]) / 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]))
