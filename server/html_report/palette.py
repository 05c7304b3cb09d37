"""Colours of the report, on paper and in the dark. The one place where they are; charts and style sheet take them.

The hues are those of Okabe & Ito's palette, which people with any colour vision tell apart, darkened (or lightened)
until they stand out from the background. Nothing is told by colour alone.
"""

from __future__ import annotations

from typing import NamedTuple


class Shade(NamedTuple):
    """A colour on light and on dark ground."""

    light: str
    dark: str


GROUND = {
    "paper": Shade("#fcfbf8", "#15181b"),
    "raised": Shade("#f3f1eb", "#1e2327"),
    "rule": Shade("#dcd8ce", "#363d43"),
}
"""Backgrounds and hairlines."""

TEXT = {
    "ink": Shade("#1c2126", "#ebe8e2"),
    "muted": Shade("#59616b", "#a7afb8"),
    "link": Shade("#00588c", "#7cc4f2"),
    "warn": Shade("#9c3d00", "#f2a65e"),
}
"""What is read: 4.5 to 1 and more on every background."""

MARKS = {
    "blue": Shade("#0072b2", "#5fb6ea"),
    "amber": Shade("#b8650a", "#e9a23b"),
    "plum": Shade("#9b4f82", "#d592bd"),
    "green": Shade("#00795a", "#37b98f"),
    "grey": Shade("#7d8590", "#8b949e"),
}
"""What is drawn: 3 to 1 and more on every background."""

BANDS = {
    "band": Shade("#e4e0d6", "#363e46"),
}
"""Areas behind marks: noise bands. They are named in words too."""

COLOURS = GROUND | TEXT | MARKS | BANDS

LIGHT = {name: shade.light for name, shade in COLOURS.items()}
"""Name -> colour that charts are drawn in; the style sheet puts the right shade in its place."""


def variables(dark: bool) -> str:
    """The colours as CSS variables."""
    return "".join(f"--{name}:{shade.dark if dark else shade.light};" for name, shade in COLOURS.items())


def classes() -> str:
    """CSS classes ``f-NAME`` (fill) and ``s-NAME`` (stroke)."""
    return "".join(f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}" for name in COLOURS)
