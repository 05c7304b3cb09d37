"""A million short texts from a finished run: memory stays flat, and kill -9 in the middle costs a shard at most.

A tiny model writes them, so that what is measured is everything but the model: the decode loop, the filters, what is
remembered of every text, the files. A process makes the first half and is killed in the middle of a shard; a second one
goes on. Memory is what a process holds at most beyond what it held when the model was there and nothing was made.

The two processes take 10 to 15 minutes together. ``FEDCORPUS_BENCH_QUICK=1`` makes 50,000 texts, in shards as many.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from server.corpus import CorpusText
from server.more.folder import Folder
from server.more.state import State
from tests.benchmarks.bars import Bar
from tests.model_run import model_run
from tests.tiny_model import make_tiny_model

TEXTS = 50_000 if os.environ.get("FEDCORPUS_BENCH_QUICK") else 1_000_000
SHARDS = 50
PER_SHARD = TEXTS // SHARDS
MOST_GROWTH_MB = 200

PROCESS = """
import json, sys
from pathlib import Path
import torch
from server.more.generate import generate_more

began = False

def step(phase, done, whole):
    global began
    if not began:
        began = True
        print("began", flush=True)

torch.set_num_threads(1)
run, texts, out, per_shard = sys.argv[1:]
report = generate_more(Path(run), int(texts), Path(out), step, texts_per_shard=int(per_shard))
print(report.model_dump_json(), flush=True)
"""


@dataclass(frozen=True)
class _Life:
    """What was seen of a process."""

    growth_mb: float
    seconds: float
    said: str


def run() -> Iterator[Bar]:
    """Make, kill, go on, count, give the bars."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        base = make_tiny_model(root / "model")
        released = [CorpusText(f"A released text, number {i}.", i % 3, "candidate") for i in range(1000)]
        space = model_run(root / "run", base, released=released, pool={"batch_size": 256, "max_new_tokens": 8})
        folder = Folder(root / "more")
        command = [sys.executable, "-c", PROCESS, str(space.root), str(TEXTS), str(folder.root), str(PER_SHARD)]

        first = _live(command, folder, kill_at=SHARDS // 2)
        before = _state(folder).texts
        lines = folder.log.read_bytes().count(b"\n") - 1
        stamps = {path.name: path.stat().st_mtime_ns for path in folder.root.glob("*.parquet")}
        print(f"killed after {first.seconds:.0f} s with {before} texts in {len(stamps)} files and {lines} in the log")

        second = _live(command, folder)
        report = json.loads(second.said)
        again = sum((folder.root / name).stat().st_mtime_ns != stamp for name, stamp in stamps.items())
        made = TEXTS - before
        print(f"went on and finished after {second.seconds:.0f} s: {made / second.seconds:.0f} texts per second")
        print(f"memory grew by {first.growth_mb:.0f} and {second.growth_mb:.0f} MB; dropped: {report['dropped']}")
        repeats, off = _check(folder, {text.text.casefold() for text in released})
        print(f"{sum(path.stat().st_size for path in folder.root.glob('*.parquet')) / 2**20:.0f} MB of Parquet files")

    yield Bar("million-memory-growth-mb", max(first.growth_mb, second.growth_mb), MOST_GROWTH_MB)
    yield Bar("million-shards-made-again", again, 1)
    yield Bar("million-texts-missing", TEXTS - report["texts"], 0)
    yield Bar("million-texts-repeated", repeats, 0)
    yield Bar("million-quotas-off", off, 0)


def _live(command: list[str], folder: Folder, kill_at: int | None = None) -> _Life:
    """Run a process to its end, or until it is in the middle of a shard."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n", "it ended before it made anything"
        least = most = _resident_mb(process.pid)
        while process.poll() is None:
            most = max(most, _resident_mb(process.pid))
            if kill_at is not None and _in_the_middle(folder, kill_at):
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.05)
        said = process.stdout.read()
    return _Life(most - least, time.perf_counter() - started, said)


def _in_the_middle(folder: Folder, shard: int) -> bool:
    if len(_state(folder).files) < shard or not folder.log.exists():
        return False
    return folder.log.read_bytes().count(b"\n") > PER_SHARD // 2


def _resident_mb(process: int) -> float:
    try:
        status = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS:")), 0.0)


def _state(folder: Folder) -> State:
    return State.model_validate_json(folder.state.read_bytes())


def _check(folder: Folder, released: set[str]) -> tuple[int, int]:
    """Texts that are there twice, or in the corpus; and texts by which codes differ from their quotas."""
    seen, count, codes = set(released), 0, Counter[Any]()
    for path in sorted(folder.root.glob("*.parquet")):
        table = pq.read_table(path, columns=["text", "topic", "tone"])
        count += table.num_rows
        seen.update(text.casefold() for text in table["text"].to_pylist())
        codes.update(zip(table["topic"].to_pylist(), table["tone"].to_pylist(), strict=True))
    wanted = Counter({("staff", "1"): 6, ("staff", "2"): 3, ("parking", "1"): 1})
    off = sum(abs(codes[code] - share * TEXTS // 10) for code, share in wanted.items())
    return len(released) + count - len(seen), off
