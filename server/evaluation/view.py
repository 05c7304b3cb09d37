"""An evaluation for people."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.markdown import printable
from server.quality import Quality, QualityNumber


def render_quality(quality: Quality, console: Console) -> None:
    """Print every number in its range, and below what the ends of each range are."""
    notes = {note: str(place) for place, note in enumerate(_notes(quality), start=1)}
    table = Table(title="Quality of the corpus", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("number", overflow="fold")
    for heading in ("floor", "value", "ceiling", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("better", no_wrap=True)
    table.add_column("note", justify="right", no_wrap=True)
    for one in quality.numbers:
        table.add_row(
            Text(printable(one.name)), _short(one.floor), Text(_short(one.value), style="bold"), _short(one.ceiling),
            _interval(one), one.direction, notes.get(one.note, ""),
        )  # fmt: skip
    console.print(table)
    for note, place in notes.items():
        console.print(Text(printable(f"{place:>2}  {note}"), style="dim"), soft_wrap=True)
    console.print(Text(printable(quality.note)), soft_wrap=True)


def _notes(quality: Quality) -> list[str]:
    return list(dict.fromkeys(one.note for one in quality.numbers if one.note))


def _interval(one: QualityNumber) -> str:
    return "-" if one.low is None or one.high is None else f"{_short(one.low)} to {_short(one.high)}"


def _short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
