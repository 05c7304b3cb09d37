"""Blank charts of the report's look: rows with a label each, or a plain field; wide, or for a phone.

Units are CSS pixels throughout: a figure is drawn at 72 dots an inch, at which matplotlib's point is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Sheet
from matplotlib.ticker import FuncFormatter, MaxNLocator

from server.html_report.palette import LIGHT
from server.html_report.svg import TIP, settings, to_svg
from server.html_report.view import Drawing
from server.html_report.visible import shortened
from server.html_report.words import count

INK, MUTED, RULE, PAPER, BAND = (LIGHT[name] for name in ("ink", "muted", "rule", "paper", "band"))
BLUE, AMBER, PLUM, GREEN, GREY = (LIGHT[name] for name in ("blue", "amber", "plum", "green", "grey"))

TEXT = 12.0
SMALL = 11.0


@dataclass
class Canvas:
    """A chart in the making.

    Attributes
    ----------
    wide
        Whether it is for a wide page.
    axes
        Where to draw. Of a chart of rows, row i is at y = i, and y grows downwards.
    tips
        gid of an artist -> words shown when it is pointed at.
    """

    wide: bool
    sheet: Sheet
    axes: Axes
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, artist: mpl.artist.Artist, words: str) -> None:
        """Words shown when the artist is pointed at."""
        name = f"{TIP}{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = words


Painter = Callable[[bool], Canvas]


def draw(name: str, title: str, description: str, paint: Painter) -> Drawing:
    """Both versions of a chart."""
    versions = []
    for wide in (True, False):
        with mpl.rc_context(settings()):
            canvas = paint(wide)
        own = f"{name}-{'wide' if wide else 'narrow'}"
        versions.append(to_svg(canvas.sheet, own, title, description, canvas.tips))
    return Drawing(*versions)


def room_for(values: Sequence[str]) -> float:
    """Pixels that numbers at the right end of rows need."""
    return max([64.0, *(7.0 * len(words) + 14 for words in values)])


def rows_of(labels: Sequence[str], wide: bool, *, right: float = 64, quiet: int | None = None) -> Canvas:
    """A row for every label.

    Parameters
    ----------
    right
        Pixels kept free for numbers at the right.
    quiet
        Position of a row whose label isn't a name, such as the sum of many.
    """
    pitch, left, below = (27.0, 216.0, 44.0) if wide else (42.0, 6.0, 44.0)
    height = pitch * max(len(labels), 1) + below + 6
    canvas = _blank(wide, height, left, right, 6, below)
    axes = canvas.axes
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(6 if wide else 4, integer=True))
    axes.grid(axis="x", color=RULE, linewidth=0.8)
    for row, label in enumerate(labels):
        colour = MUTED if row == quiet else INK
        x, y, anchor, most = (-10 / _inner(wide, left, right), row, "right", 30) if wide else (0, row - 0.3, "left", 46)
        axes.text(
            x, y, shortened(label, most), transform=axes.get_yaxis_transform(), ha=anchor, va="center_baseline",
            fontsize=TEXT, color=colour,
        )  # fmt: skip
    return canvas


def field_of(wide: bool, *, right: float, left: float = 46, height: float = 0) -> Canvas:
    """An empty field with both axes."""
    canvas = _blank(wide, height or (270 if wide else 240), left, right, 14, 46)
    canvas.axes.grid(axis="y", color=RULE, linewidth=0.8)
    canvas.axes.xaxis.set_major_locator(MaxNLocator(8 if wide else 5, integer=True))
    canvas.axes.yaxis.set_major_locator(MaxNLocator(5))
    return canvas


def bar_height(wide: bool) -> float:
    """Of a bar in a chart of rows, in rows."""
    return 0.52 if wide else 0.34


def middle(row: int, wide: bool) -> float:
    """Where a row's marks are: on a phone the label is above them."""
    return row if wide else row + 0.14


def name_x(canvas: Canvas, words: str, *, percent: bool = False) -> None:
    """Words below the horizontal axis, and its numbers' format."""
    form = (lambda v, _: f"{v * 100:g} %") if percent else (lambda v, _: count(v) if v == round(v) else f"{v:g}")
    canvas.axes.xaxis.set_major_formatter(FuncFormatter(form))
    if percent:
        canvas.axes.xaxis.set_major_locator(MaxNLocator(6 if canvas.wide else 4))
    canvas.axes.set_xlabel(words, fontsize=SMALL, color=MUTED, labelpad=7)


def value(canvas: Canvas, row: int, words: str, colour: str = MUTED) -> None:
    """A number at the right end of a row."""
    axes = canvas.axes
    inner = axes.get_position().width * canvas.sheet.get_figwidth() * 72
    axes.text(
        1 + 8 / inner, middle(row, canvas.wide), words, transform=axes.get_yaxis_transform(), ha="left",
        va="center_baseline", fontsize=SMALL, color=colour,
    )  # fmt: skip


def width_of(wide: bool) -> float:
    """Of a chart."""
    return 760.0 if wide else 340.0


def _inner(wide: bool, left: float, right: float) -> float:
    return width_of(wide) - left - right


def _blank(wide: bool, height: float, left: float, right: float, above: float, below: float) -> Canvas:
    width = width_of(wide)
    sheet = Sheet(figsize=(width / 72, height / 72), dpi=72)
    sheet.patch.set_visible(False)
    axes = sheet.add_axes(
        (left / width, below / height, (width - left - right) / width, (height - above - below) / height)
    )
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=SMALL, labelcolor=MUTED, pad=7)
    for side in axes.spines.values():
        side.set_visible(False)
    return Canvas(wide, sheet, axes)
