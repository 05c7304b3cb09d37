"""A summary for people: the closing table of the command line, and a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from server.progress import PHASES
from server.summary import CodeSummary, SiteSummary, Summary, phases
from server.workspace import Workspace, write_atomically

MAX_CODES = 30
SHOWN_CODES = 20


def write_summary(workspace: Workspace, summary: Summary) -> None:
    """Write ``summary.json`` and ``SUMMARY.md``."""
    write_atomically(workspace.summary_json, summary.model_dump_json(indent=1).encode())
    write_atomically(workspace.summary_text, to_markdown(summary).encode())


def render_summary(summary: Summary, console: Console) -> None:
    """Print a summary. Synthetic texts are shown as they are: no markup in them has an effect."""
    console.print()
    console.print(_code_table(summary))
    console.print(_site_table(summary))
    console.print(Text(_promise(summary)))
    console.print()
    for sample in summary.samples:
        console.print(Text(sample.label, style="bold"))
        console.print(Padding(Text(_printable(sample.text)), (0, 0, 0, 2)))
    console.print()
    for warning in summary.warnings:
        console.print(Text(f"note: {_printable(warning)}", style="yellow"))
    for name, path in summary.files.items():
        console.print(Text(f"{name}: {path}"), soft_wrap=True)


def to_markdown(summary: Summary) -> str:
    """A page a person can read."""
    codes = [
        f"| {_cell(c.label)} | {c.profile} | {c.wanted} | {c.made} | {c.chosen} | {c.fresh} | {c.repeated} "
        f"| {c.candidates} |"
        for c in summary.codes
    ]
    sites = [
        f"| {_cell(s.name)} | {s.tier} | {s.size_class} | {s.answers} | {_cell(s.outcome)} | {_epsilon(s)} |"
        for s in summary.sites
    ]
    samples = [f"- **{_cell(s.label)}**: {_cell(s.text)}" for s in summary.samples]
    return "\n".join(
        [
            f"# Study {summary.study}, run {summary.run_id}",
            "",
            f"{summary.corpus_size} synthetic texts under {len(summary.codes)} control codes, selected from "
            f"{summary.pool_size} candidates (rule `{summary.selection}`, K={summary.neighbours}).",
            "",
            _promise(summary),
            "",
            "## What was asked and what came",
            "",
            "| code | noisy profile | wanted | made | candidates chosen | fresh | repeated | in the pool |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            *codes,
            "",
            "## Sites",
            "",
            "| site | tier | size class | answers | outcome | joint ε |",
            "|---|---|---:|---:|---|---:|",
            *sites,
            "",
            "## Samples",
            "",
            *samples,
            "",
            "## Notes",
            "",
            *([f"- {_cell(w)}" for w in summary.warnings] or ["- none"]),
            "",
            f"Time: {phases(summary.seconds, PHASES)}. Study {summary.study_sha256}.",
            "",
            *[f"- {name}: `{path}`" for name, path in summary.files.items()],
            "",
        ]
    )


def _code_table(summary: Summary) -> Table:
    table = Table(title=f"Corpus of study {summary.study}: {summary.corpus_size} texts", box=SIMPLE_HEAD)
    for name in summary.attributes:
        table.add_column(name, overflow="fold")
    for heading in ("profile", "wanted", "made", "fresh", "votes"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown, rest = _largest(summary.codes)
    for code in shown:
        table.add_row(
            *map(Text, code.values),
            *map(
                str,
                (code.profile, code.wanted, code.made, code.fresh + code.repeated, code.votes),
            ),
        )
    if rest:
        table.add_row(
            f"… and {len(rest)} more codes",
            *[""] * (len(summary.attributes) - 1),
            *(
                str(sum(values))
                for values in (
                    [c.profile for c in rest],
                    [c.wanted for c in rest],
                    [c.made for c in rest],
                    [c.fresh + c.repeated for c in rest],
                    [c.votes for c in rest],
                )
            ),
        )
    return table


def _site_table(summary: Summary) -> Table:
    table = Table(title="Sites", box=SIMPLE_HEAD)
    for heading in ("site", "tier", "size class", "answers", "outcome", f"ε at δ={summary.delta:g}"):
        table.add_column(heading, justify="right" if heading in ("size class", "answers") else "left")
    for site in summary.sites:
        table.add_row(
            Text(site.name),
            site.tier,
            str(site.size_class),
            str(site.answers),
            Text(site.outcome),
            _epsilon(site),
        )
    return table


def _largest(codes: Sequence[CodeSummary]) -> tuple[Sequence[CodeSummary], Sequence[CodeSummary]]:
    if len(codes) <= MAX_CODES:
        return codes, ()
    by_size = sorted(codes, key=lambda code: -code.wanted)
    return by_size[:SHOWN_CODES], by_size[SHOWN_CODES:]


def _promise(summary: Summary) -> str:
    return (
        f"Privacy: every site's releases together are (ε={summary.epsilon:.3g}, δ={summary.delta:g})-differentially "
        f"private for adding or removing one {summary.unit}. This is the corpus' guarantee for a person whose "
        "documents are at one site; for a person at several sites the guarantees add up."
    )


def _epsilon(site: SiteSummary) -> str:
    return "-" if site.epsilon is None else f"{site.epsilon:.3f}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _cell(text: str) -> str:
    """Text inside a Markdown table or list: nothing in it may become structure."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|!" else c for c in _printable(text))
