"""A summary for people: the closing table of the command line, and a page of Markdown.

What is shown is public or already noised. Synthetic texts, names and warnings are data: no markup or control character
in them has an effect. A bound of a promise is only ever rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from server.markdown import code as _code
from server.markdown import escaped as _cell
from server.markdown import excerpt
from server.markdown import printable as _printable
from server.progress import PHASES
from server.strategies.aggregation import RoundReport
from server.summary import CodeSummary, SiteSummary, Summary, phases
from server.workspace import Workspace, write_atomically

MAX_CODES = 30
SHOWN_CODES = 20
SHOWN_ROUNDS = 10
SCREEN_CHARACTERS = 400
"""Of a sample, on a screen: five lines at 80 columns."""
PAGE_CHARACTERS = 2000
"""Of a sample, on the page."""


class _Row(NamedTuple):
    """Numbers of one code, or of several together. ``fresh`` are the texts that no one voted on."""

    profile: int
    votes: int
    candidates: int
    wanted: int
    made: int
    chosen: int
    fresh: int
    repeated: int


def write_summary(workspace: Workspace, summary: Summary) -> None:
    """Write ``summary.json`` and ``SUMMARY.md``."""
    write_atomically(workspace.summary_text, to_markdown(summary).encode())
    # Last: a run that has it is finished.
    write_atomically(workspace.summary_json, summary.model_dump_json(indent=1).encode())


def render_summary(summary: Summary, console: Console) -> None:
    """Print a summary: what came per code and per site, the privacy promise, samples, notes and files."""
    console.print()
    console.print(_code_table(summary))
    console.print(_site_table(summary))
    if summary.rounds:
        console.print(_round_table(summary))
    for line in (_origin(summary), _promise(summary)):
        console.print(Text(line))
        console.print()
    for sample in summary.samples:
        console.print(Text(_printable(sample.label), style="bold"))
        console.print(Padding(Text(excerpt(sample.text, SCREEN_CHARACTERS)), (0, 0, 0, 2)))
    console.print()
    for warning in summary.warnings:
        console.print(Text(f"note: {_printable(warning)}", style="yellow"))
    console.print(Text(f"time: {phases(summary.seconds, PHASES)}"))
    for name, path in summary.files.items():
        console.print(Text(_printable(f"{name}: {path}")), soft_wrap=True)


def to_markdown(summary: Summary) -> str:
    """A page a person can read. All codes are in ``summary.json``; the page shows the largest if there are many."""
    shown, rest = _largest(summary.codes)
    rows = [(_cell(code.label), _row([code])) for code in shown]
    rows += [(f"{len(rest)} more codes", _row(rest))] if rest else []
    rows += [("**all**", _row(summary.codes))]
    sites = [
        f"| {_cell(s.name)} | {_cell(s.tier)} | {s.size_class} | {s.answers} | {_cell(s.outcome)} | {_epsilon(s)} |"
        for s in summary.sites
    ]
    samples = [f"- **{_cell(s.label)}**: {_cell(excerpt(s.text, PAGE_CHARACTERS))}" for s in summary.samples]
    return "\n".join(
        [
            f"# Study {_cell(summary.study)}, run {_cell(summary.run_id)}",
            "",
            _origin(summary),
            "",
            _promise(summary),
            "",
            "## What was asked and what came",
            "",
            "Profile and votes are sums over sites and carry noise, so they may be negative. Wanted: the code's share "
            "of the corpus by the profile. Made: its texts in the corpus, namely candidates taken from the pool, "
            "fresh texts generated after the vote, and repeats where the generator had no more to give.",
            "",
            "| code | noisy profile | noisy votes | candidates | wanted | made | candidates taken | fresh | repeats |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
            *(f"| {label} | {' | '.join(map(str, row))} |" for label, row in rows),
            "",
            "## Sites",
            "",
            "ε is the most that everything the study asks of a site can cost one of its units, at "
            f"δ={summary.delta:g}; a site that wasn't asked has none.",
            "",
            "| site | tier | size class | answers | outcome | ε |",
            "|---|---|---:|---:|---|---:|",
            *sites,
            "",
            "## Training",
            "",
            "Signal to noise: the most that a round's signal can be over its noise, from public numbers alone. Shared: "
            "which part of their change of the adapter the sites have in common, estimated from the noised changes. "
            "Then the norm of each site's change, and its cosine with the mean change of the others.",
            "",
            "| round | signal to noise | shared | changes by site |",
            "|---:|---:|---:|---|",
            *(f"| {' | '.join(_cell(cell) for cell in _round_cells(report))} |" for report in summary.rounds),
            "",
            "## Samples",
            "",
            *(samples or ["- none"]),
            "",
            "## Notes",
            "",
            *([f"- {_cell(w)}" for w in summary.warnings] or ["- none"]),
            "",
            "## Record",
            "",
            f"- study hash: `{_code(summary.study_sha256)}`",
            f"- time: {phases(summary.seconds, PHASES)}",
            f"- software: {_cell(_listed(summary.software))}",
            *[f"- {_cell(name)}: `{_code(path)}`" for name, path in summary.files.items()],
            "",
        ]
    )


def _code_table(summary: Summary) -> Table:
    table = _table(f"Corpus of study {summary.study}: {summary.corpus_size} texts")
    for name in summary.attributes:
        table.add_column(Text(_printable(name)), overflow="fold")
    for heading in ("profile", "wanted", "made", "fresh", "votes"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown, rest = _largest(summary.codes)
    for code in shown:
        table.add_row(*(Text(_printable(value)) for value in code.values), *_cells(_row([code])))
    if rest:
        blank = [""] * (len(summary.attributes) - 1)
        table.add_row(f"… and {len(rest)} more codes", *blank, *_cells(_row(rest)))
    return table


def _site_table(summary: Summary) -> Table:
    table = _table(f"Sites (ε at δ={summary.delta:g})")
    for heading in ("site", "tier", "size class", "answers", "outcome", "ε"):
        is_number = heading in ("size class", "answers", "ε")
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    for site in summary.sites:
        table.add_row(
            Text(_printable(site.name)),
            Text(_printable(site.tier)),
            str(site.size_class),
            str(site.answers),
            Text(_printable(site.outcome)),
            _epsilon(site),
        )
    return table


def _round_table(summary: Summary) -> Table:
    table = _table("Training rounds: changes of the adapter (cosine with the others')")
    for heading in ("round", "signal/noise", "shared"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("change by site", overflow="fold")
    first = summary.rounds[:-SHOWN_ROUNDS]
    if first:
        table.add_row(f"1-{len(first)}", "…", "…", "in summary.json")
    for report in summary.rounds[len(first) :]:
        table.add_row(*(Text(_printable(cell)) for cell in _round_cells(report)))
    return table


def _round_cells(report: RoundReport) -> tuple[str, str, str, str]:
    changes = ", ".join(
        f"{u.site} {u.norm:.3g}" + ("" if u.cosine is None else f" ({u.cosine:+.2f})") for u in report.updates
    )
    shared = "-" if report.shared is None else f"{report.shared:.1%}"
    return str(report.round), f"≤ {report.signal_to_noise:.2g}", shared, changes


def _table(title: str) -> Table:
    return Table(
        title=Text(_printable(title), style="bold"), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def _cells(row: _Row) -> tuple[str, ...]:
    return tuple(map(str, (row.profile, row.wanted, row.made, row.fresh + row.repeated, row.votes)))


def _row(codes: Sequence[CodeSummary]) -> _Row:
    return _Row(*(sum(getattr(code, name) for code in codes) for name in _Row._fields))


def _largest(codes: Sequence[CodeSummary]) -> tuple[Sequence[CodeSummary], Sequence[CodeSummary]]:
    if len(codes) <= MAX_CODES:
        return codes, ()
    by_size = sorted(codes, key=lambda code: -code.wanted)
    return by_size[:SHOWN_CODES], by_size[SHOWN_CODES:]


def _origin(summary: Summary) -> str:
    """Where the texts come from, in words."""
    total = _row(summary.codes)
    answered = sum(site.outcome.startswith("answered") for site in summary.sites)
    dropped = _listed({reason: str(count) for reason, count in summary.dropped.items()})
    rule = f"rule {summary.selection}, {summary.votes_per_unit} votes a {summary.unit}"
    if summary.selection == "uniform":
        rule = "evenly, votes had no say"
    sentences = [
        f"{total.made} of {total.wanted} texts under {len(summary.codes)} control codes; {answered} of "
        f"{len(summary.sites)} sites answered.",
        f"{total.chosen} texts were chosen from {summary.pool_size} candidates ({rule}), {total.fresh} were generated "
        f"after the vote and {total.repeated} are repeats.",
        f"Generated texts that weren't kept: {dropped}." if dropped else "",
    ]
    return " ".join(filter(None, sentences))


def _promise(summary: Summary) -> str:
    return (
        f"Privacy: every site's releases together are (ε={at_most(summary.epsilon)}, δ={summary.delta:g})-"
        f"differentially private for adding or removing one {summary.unit}. This is the corpus' guarantee for a "
        "person whose documents are at one site; for a person at several sites the guarantees add up."
    )


def _epsilon(site: SiteSummary) -> str:
    return "-" if site.epsilon is None else at_most(site.epsilon)


def at_most(epsilon: float) -> str:
    """Three decimals, rounded up: a promise may not look better than it is."""
    if not math.isfinite(epsilon):
        return "∞"
    # What is below the millionth is the float's, not the accountant's: 7.99 stays 7.990.
    return f"{math.ceil(epsilon * 1000 - 1e-6) / 1000:.3f}"


def _listed(named: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in named.items())
