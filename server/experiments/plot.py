"""The tables as a picture (SVG): every row over the columns, or bars where there is one column."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from common.errors import MissingExtraError
from server.experiments.plan import Experiment, Table
from server.experiments.runner import Row
from server.experiments.tables import columns_of, entries_of, spread

_WIDTH, _HEIGHT = 6.4, 4.5
# Of the room that a column has, what its points take.
_SPREAD = 0.6


def svg(experiment: Experiment, rows: Sequence[Row]) -> bytes:
    """One panel a table.

    Raises
    ------
    MissingExtraError
        If matplotlib isn't installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise MissingExtraError("matplotlib isn't installed; pip install 'fedcorpus[coordinator]'") from cause
    tables = [table for table in experiment.tables if entries_of(table, rows)]
    # Text as text, and the same picture from the same numbers.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": experiment.name}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT * max(len(tables), 1)), layout="constrained")
        for place, table in enumerate(tables, start=1):
            axes = figure.add_subplot(len(tables), 1, place)
            (_bars if table.columns is None else draw_points)(axes, table, rows)
            axes.set_title(table.title, fontsize=10)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def draw_points(axes: Any, table: Table, rows: Sequence[Row]) -> None:
    """A line for every row, or points beside each other where columns have no order that a line could follow."""
    entries = entries_of(table, rows)
    columns = columns_of(entries)
    ordered = all(isinstance(column, int | float) for column in columns)
    for number, (name, own) in enumerate(entries.items()):
        beside = 0.0 if ordered else _SPREAD * ((number + 0.5) / len(entries) - 0.5)
        values = [(columns.index(column) + beside, spread(found, table.measure)) for column, found in own.items()]
        there = sorted((place, value.mean, value.deviation) for place, value in values if value is not None)
        if there:
            places, means, deviations = zip(*there, strict=True)
            line = "-" if ordered else "none"
            axes.errorbar(places, means, deviations, marker="o", linestyle=line, capsize=3, label=name)
    axes.set_xticks(range(len(columns)), [str(column) for column in columns])
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_xlabel((table.columns or "").removesuffix(".name").rpartition(".")[2])
    axes.set_ylabel(table.measure)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)


def _bars(axes: Any, table: Table, rows: Sequence[Row]) -> None:
    found = [(name, spread(own.get(None, []), table.measure)) for name, own in entries_of(table, rows).items()]
    there = [(name, value) for name, value in found if value is not None]
    places = range(len(there))
    axes.barh(places, [v.mean for _, v in there], xerr=[v.deviation for _, v in there], capsize=3)
    axes.set_yticks(places, [name for name, _ in there])
    axes.invert_yaxis()
    axes.set_xlabel(table.measure)
