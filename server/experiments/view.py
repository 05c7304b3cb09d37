"""Shows a person what came of an experiment."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from server.experiments.command import Outcome
from server.experiments.estimate import in_words


def render_outcome(outcome: Outcome, screen: Console) -> None:
    """Where the results are, and what is missing."""
    report = outcome.report
    if not outcome.files:
        screen.print(Text(f"about {in_words(outcome.estimated_seconds)} of work"), soft_wrap=True)
        return
    screen.print(Text(f"{len(report.rows)} results in {in_words(outcome.seconds)}"), soft_wrap=True)
    for name, seconds in report.left.items():
        screen.print(Text(f"left: {name}, about {in_words(seconds)}"), soft_wrap=True)
    for name, why in report.failed.items():
        screen.print(Text(f"failed: {name}: {why}"), soft_wrap=True)
    for file in outcome.files:
        screen.print(Text(str(file)), soft_wrap=True)
