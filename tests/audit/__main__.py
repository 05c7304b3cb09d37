"""``python -m tests.audit``: run every audit, print one table; exit 1 if a claim is refuted or a twin is missed."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.audit import noise, training, votes
from tests.audit.finding import Audit, Finding

REPLAYS, GROSS_REPLAYS = 5000, 1000


def main() -> int:
    """Run and report."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fedcorpus-audit-") as folder:
        print("preparing text, embeddings, model and canaries", file=sys.stderr)
        audits = [
            *votes.audits(Path(folder), REPLAYS, GROSS_REPLAYS),
            *training.audits(Path(folder)),
            *noise.audits(),
        ]
        # As they ship first, then the twins.
        findings = _run(sorted(audits, key=lambda audit: bool(audit.changed)))
    print(_table(findings))
    failed = sum(not finding.ok for finding in findings)
    if failed:
        print(f"{failed} of {len(findings)} audits failed", file=sys.stderr)
    return 1 if failed else 0


def _run(audits: Sequence[Audit]) -> list[Finding]:
    """Run the audits in turn; bars on a terminal, a line each elsewhere."""
    console = Console(stderr=True)
    live = console.is_terminal
    columns = TextColumn("{task.description:58}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    findings = []
    with Progress(*columns, console=console, disable=not live) as bars:
        overall = bars.add_task("audits", total=len(audits))
        for number, audit in enumerate(audits, start=1):
            bar = bars.add_task(audit.name, total=100)
            started = time.monotonic()
            measurement = audit.measure(lambda share, bar=bar: bars.update(bar, completed=int(100 * share)))
            findings.append(Finding(audit, measurement))
            bars.remove_task(bar)
            bars.advance(overall)
            if not live:
                spent = time.monotonic() - started
                print(f"{number} of {len(audits)}: {audit.name}, {spent:.1f} s", file=sys.stderr, flush=True)
    return findings


def _table(findings: Sequence[Finding]) -> str:
    rows = [("mechanism", "what was changed", "claim", "measured", "verdict")]
    rows += [
        (f.audit.mechanism, f.audit.changed or "-", f.measurement.claim, f.measurement.measured, f.verdict)
        for f in findings
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
