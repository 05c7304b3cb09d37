"""The results page: what was measured, as mean and standard deviation over the seeds (Markdown)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from server.experiments.estimate import in_words
from server.experiments.judges import LOWER_IS_BETTER
from server.experiments.plan import Experiment, Table, name_of
from server.experiments.pooling import pool_name
from server.experiments.runner import Report, Row
from server.experiments.situation import TUNED
from server.markdown import escaped

NOTHING = "–"


@dataclass(frozen=True)
class Spread:
    """A number over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean."""
        return fmean(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation of a draw; 0 if there is one."""
        return stdev(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self}"

    def __format__(self, sign: str) -> str:
        """``+`` writes the mean's sign whatever it is."""
        mean = f"{self.mean:{sign}.3f}"
        return f"{mean} ± {self.deviation:.3f}" if len(self.values) > 1 else mean


def spread(rows: Iterable[Row], measure: str) -> Spread | None:
    """A number over rows; None if none has it."""
    values = tuple(row.numbers[measure] for row in rows if measure in row.numbers)
    return Spread(values) if values else None


def page(experiment: Experiment, rows: Sequence[Row], report: Report, documents: Mapping[str, int]) -> str:
    """The whole page.

    Parameters
    ----------
    report
        What was left out and what failed in the last run.
    documents
        What there is of them -> how many.
    """
    parts = [
        f"# {escaped(experiment.title)}\n",
        f"{escaped(experiment.about)}\n" if experiment.about else "",
        _conditions(experiment, rows, documents),
        *(render_table(table, rows) for table in experiment.tables if entries_of(table, rows)),
        _everything(experiment, rows),
        _costs(rows),
        _holes(report),
    ]
    return "\n".join(part for part in parts if part)


def entries_of(table: Table, rows: Sequence[Row]) -> dict[str, dict[Any, list[Row]]]:
    """A table's rows by name, and of each the results by column; each entry is of one cell, over its seeds."""
    found: dict[str, dict[Any, list[Row]]] = {}
    for row in rows:
        if row.label in table.labels or not table.labels:
            column = None if table.columns is None else _hashable(row.settings.get(table.columns))
            own = found.setdefault(name_of(row.label, row.chosen, table.columns), {})
            own.setdefault(column, []).append(row)
    return found


def columns_of(entries: Mapping[str, Mapping[Any, Sequence[Row]]]) -> list[Any]:
    """Columns: numbers from the least up, else in the order of the cells."""
    columns = list(dict.fromkeys(column for own in entries.values() for column in own))
    return sorted(columns) if all(isinstance(column, int | float) for column in columns) else columns


def render_table(table: Table, rows: Sequence[Row]) -> str:
    """One table; what isn't there yet is a dash."""
    entries = entries_of(table, rows)
    columns = columns_of(entries)
    heads = ["", *([table.measure] if table.columns is None else [_head(table.columns, value) for value in columns])]
    body = [
        [name, *(_shown(spread(own.get(column, []), table.measure)) for column in columns)]
        for name, own in entries.items()
    ]
    if table.gap is not None:
        body.append(["gain by refinement, seed by seed", *(_gain(table, entries, column) for column in columns)])
        body.append(["share of the gap won back", *(_won_back(table, entries, column) for column in columns)])
    what = "" if table.columns is None else f"{escaped(table.measure)}, mean ± standard deviation over seeds.\n\n"
    paper = f"\nIn the paper: {escaped(table.paper)}\n" if table.paper else ""
    return f"## {escaped(table.title)}\n\n{what}{_markdown(heads, body)}{paper}"


def won_back(without: Spread, noisy: Spread, refined: Spread) -> float:
    """Share of what noise costs that refinement wins back; not a number if noise costs nothing."""
    gap = without.mean - noisy.mean
    return (refined.mean - noisy.mean) / gap if gap else math.nan


def _gain(table: Table, entries: Mapping[str, Mapping[Any, Sequence[Row]]], column: Any) -> str:
    """Refined less noisy, with the same documents, adapter and pool: only the votes are new."""
    names = (table.gap or ("", "", ""))[1:]
    noisy, refined = ({row.seed: row for row in entries.get(name, {}).get(column, [])} for name in names)
    differences = [
        refined[seed].numbers[table.measure] - before.numbers[table.measure]
        for seed, before in noisy.items()
        if seed in refined and _of_one_pool(before, refined[seed])
        if table.measure in before.numbers and table.measure in refined[seed].numbers
    ]
    return f"{Spread(tuple(differences)):+}" if differences else NOTHING


def _of_one_pool(first: Row, second: Row) -> bool:
    """Rows of two machines may have the same seed and other noise: their difference isn't what votes do."""
    return all(first.results.get(step) == second.results.get(step) for step in (TUNED, pool_name(1)))


def _won_back(table: Table, entries: Mapping[str, Mapping[Any, Sequence[Row]]], column: Any) -> str:
    names = table.gap or ("", "", "")
    without, noisy, refined = (spread(entries.get(name, {}).get(column, []), table.measure) for name in names)
    if without is None or noisy is None or refined is None:
        return NOTHING
    # How much worse the noisy one is.
    cost = (noisy.mean - without.mean) * (1 if table.measure.startswith(LOWER_IS_BETTER) else -1)
    if cost <= math.hypot(without.deviation, noisy.deviation):
        return f"{NOTHING} (what noise costs, {cost:.3f}, is no more than the seeds' spread)"
    return f"{won_back(without, noisy, refined):.0%} of {cost:.3f}"


def _head(columns: str, value: Any) -> str:
    setting = columns.rpartition(".")[2]
    return str(value) if setting == "name" else f"{setting} {value}"


def _conditions(experiment: Experiment, rows: Sequence[Row], documents: Mapping[str, int]) -> str:
    sizes = ", ".join(f"{number} {what}" for what, number in documents.items())
    lines = [
        f"Documents: {escaped(experiment.data.file)} ({sizes}).",
        f"Seeds: {', '.join(map(str, experiment.seeds))}; noise has none, so numbers of another run differ.",
    ]
    for name in dict.fromkeys(row.model for row in rows):
        model = experiment.models[name]
        made = "" if model.pretraining is None else "pre-trained here on other public text; "
        base = f"`{model.base}`; " if model.base else ""
        lines.append(f"Model {escaped(name)}: {base}{made}{escaped(model.note)}".rstrip("; ") + ".")
    if any(not row.settings["noise"] and row.settings["trains"] != "nobody" for row in rows):
        lines.append("Training without privacy has neither clipping nor noise, and no door: on public text only.")
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _everything(experiment: Experiment, rows: Sequence[Row]) -> str:
    measures = list(dict.fromkeys(name for row in rows for name in row.numbers))
    if not measures:
        return "No numbers yet.\n"
    heads = ["cell", "model", "seeds", *(f"{name} {_arrow(name)}" for name in measures)]
    body = []
    for named in experiment.cells:
        own = [row for row in rows if row.cell == named.name]
        if own:
            numbers = [_shown(spread(own, measure)) for measure in measures]
            body.append([named.name, own[0].model, str(len(own)), *numbers])
    return f"## All numbers\n\n{_markdown(heads, body)}"


def _costs(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.notes))
    if not names:
        return ""
    body = []
    for cell in dict.fromkeys(row.cell for row in rows):
        own = [row for row in rows if row.cell == cell]
        found = [[row.notes[name] for row in own if name in row.notes] for name in names]
        body.append([cell, *(f"{fmean(values):.4g}" if values else NOTHING for values in found), _seconds(own)])
    return f"## Privacy, sizes and time\n\n{_markdown(['cell', *names, 'time, all steps'], body)}"


def _holes(report: Report) -> str:
    lines = [f"- {escaped(name)}: about {in_words(seconds)}" for name, seconds in report.left.items()]
    parts = ["## Not done: the budget was used up\n\n" + "\n".join(lines) + "\n"] if lines else []
    lines = [f"- {escaped(name)}: {escaped(why)}" for name, why in report.failed.items()]
    return "\n".join([*parts, *(["## Failed\n\n" + "\n".join(lines) + "\n"] if lines else [])])


def _seconds(rows: Sequence[Row]) -> str:
    return in_words(fmean(sum(row.seconds.values()) for row in rows))


def _arrow(measure: str) -> str:
    return "↓" if measure.startswith(LOWER_IS_BETTER) else "↑"


def _shown(found: Spread | None) -> str:
    return NOTHING if found is None else str(found)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *body]
    return "".join(f"| {' | '.join(escaped(cell) for cell in line)} |\n" for line in lines)
