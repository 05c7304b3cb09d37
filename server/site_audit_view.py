"""A leak check for the operator: every number beside what to expect of a corpus that leaks nothing.

What texts and documents share is printed on request only, as one line without control characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.site.audit.findings import rows_named
from common.site.audit.found import LeakCheck, LowEnd, NeighboursFound, RunsFound, SequencesFound, Spread
from server.markdown import excerpt, printable

SHOWN = 10
"""Suspects, and identifiers of a kind, that are shown."""

CHARACTERS = 300
"""Of a shared run that are shown."""

Row = tuple[str, str, str, str]
"""Measure, of the texts, to expect, what it is."""


def render_leak_check(check: LeakCheck, console: Console, *, texts: bool) -> None:
    """Print what was compared, the measures, the suspects and the findings.

    Parameters
    ----------
    texts
        Whether to print what texts share with documents, which is text of documents.
    """
    _say(console, _compared(check))
    measures = _measures(check)
    console.print(_measure_table(measures))
    for name, _, _, what in measures:
        _say(console, f"{name}: {what}.", "dim")
    console.print()
    console.print(_identifiers(check))
    if texts:
        for line in _shared(check):
            _say(console, line)
    _say(console, check.caution, "dim")
    for finding in check.findings:
        _say(console, f"LOOK: {finding}", "red")
    if check.findings:
        _say(console, f"{len(check.findings)} of the limits ([leak_check] in site.toml) are passed.", "bold red")
    else:
        _say(console, "No limit ([leak_check] in site.toml) is passed.", "bold green")


def _compared(check: LeakCheck) -> str:
    lines = [f"{check.texts} texts against {check.documents} documents of {check.units} units"]
    if check.unreadable:
        lines.append(f"{check.unreadable} rows of the corpus have no readable text")
    if check.held_out is not None:
        lines.append(f"{check.held_out} held-out documents; {check.overlap} were left out, which are documents too")
        lines.append(f"Expected: what {check.bystanders} of the held-out documents have in common with documents.")
    elif check.bystanders:
        lines.append(
            f"Expected: what {check.bystanders} of the documents have in common with those of other units. Held-out "
            "documents (--holdout FILE) tell more."
        )
    else:
        lines.append(
            "Too few documents to tell what to expect of a corpus that leaks nothing; --holdout FILE names others."
        )
    return "\n".join(lines)


def _measures(check: LeakCheck) -> list[Row]:
    sequences = [row for part in check.sequences for row in _of_sequences(part)]
    return [*_of_runs(check.runs), *sequences, *_of_neighbours(check.neighbours)]


def _measure_table(rows: Sequence[Row]) -> Table:
    table = _table("Shared with documents", ("", "texts", "expected"))
    for row in rows:
        table.add_row(*map(Text, row[:3]))
    return table


def _of_runs(runs: RunsFound) -> Iterator[Row]:
    what = "a text's longest run that a document has, in characters; median, 90 %, 99 %, most. Expected: no more"
    yield "longest run", _numbers(runs.characters, "{:.0f}"), _numbers(runs.bystanders, "{:.0f}"), what
    if runs.paired and runs.held_out:
        what = "with as many documents as are held out, and with the held-out ones. Expected: alike"
        yield "- like for like", _numbers(runs.paired, "{:.0f}"), _numbers(runs.held_out, "{:.0f}"), what
    rows = len({suspect.row for suspect in runs.suspects})
    by_chance = "" if runs.bystander_suspects is None else str(runs.bystander_suspects)
    yield "suspects", str(rows), by_chance, "texts with a long run that documents of few units have; look at each"
    yield "boilerplate", str(runs.common), "", "texts with long runs that documents of many units have"
    yield "identical", str(runs.identical), "", "texts that are a document as a whole, short ones too"


def _of_sequences(part: SequencesFound) -> Iterator[Row]:
    what = f"share of the texts' sequences of {part.words} words that is in documents. Expected: no more"
    yield f"{part.words} words", f"{part.share:.2%}", _percent(part.bystanders), what
    if part.excess:
        interval = f"the difference is {part.excess.low:+.2%} to {part.excess.high:+.2%}"
        what = f"in as many documents as are held out, and in the held-out ones; {interval}. Expected: 0"
        yield "- like for like", _percent(part.paired), _percent(part.held_out), what
        what = "share of texts with one that only those documents have, and only the held-out ones. Expected: alike"
        yield "- on one side", _percent(part.only_documents), _percent(part.only_held_out), what


def _of_neighbours(found: NeighboursFound) -> Iterator[Row]:
    name = printable(found.embedder)
    what = f"to the nearest document, by {name}, 0 is the same; least, 1 %, 10 %, median. Expected: no less"
    yield "distance", _numbers(found.distance, "{:.2f}"), _numbers(found.bystander_distance, "{:.2f}"), what
    what = "1 - nearest / second nearest, 1 copies one document; median, 90 %, 99 %, most. Expected: no more"
    yield "nearest alone", _numbers(found.ratio, "{:.2f}"), _numbers(found.bystander_ratio, "{:.2f}"), what
    if found.nearer:
        interval = f"surely {found.nearer.low:.1%} to {found.nearer.high:.1%}"
        what = f"share of texts that are nearer to documents than to as many held-out ones; {interval}"
        yield "nearer", f"{found.nearer.value:.1%}", "50.0%", what


def _identifiers(check: LeakCheck) -> Table:
    table = _table("Personal identifiers, different ones", ("", "texts", "documents too", "of few units", "expected"))
    for kind in check.identifiers:
        if kind.distinct:
            numbers = (kind.distinct, kind.in_documents, kind.rare, f"{kind.by_chance:.1f}")
            table.add_row(Text(printable(kind.kind)), *map(str, numbers))
    return table


def _shared(check: LeakCheck) -> Iterator[str]:
    """What texts share with documents: text of documents."""
    suspects = check.runs.suspects
    if suspects:
        yield "Longest runs that texts share with documents of few units (your documents' text: mind who sees it)"
    for suspect in suspects[:SHOWN]:
        whole = ", all of the text" if suspect.whole else ""
        size = f"{suspect.characters} characters, {suspect.words} words, {suspect.units} units"
        yield f"  row {suspect.row}: {size}{whole}: {excerpt(suspect.run, CHARACTERS)}"
    if len(suspects) > SHOWN:
        yield f"  and {len(suspects) - SHOWN} more"
    for kind in check.identifiers:
        if kind.rare:
            written = "; ".join(excerpt(one, CHARACTERS) for one in kind.written[:SHOWN])
            more = f"; and {kind.rare - SHOWN} more" if kind.rare > SHOWN else ""
            yield f"{kind.kind}, in documents of few units: {written}{more} ({rows_named(kind.rare_rows)})"


def _numbers(spread: Spread | LowEnd | None, form: str) -> str:
    return "" if spread is None else " ".join(form.format(value) for value in spread.model_dump().values())


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _say(console: Console, line: str, style: str = "") -> None:
    for part in line.splitlines():
        console.print(Text(printable(part), style=style), soft_wrap=True)
