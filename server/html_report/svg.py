"""matplotlib's SVG, made fit for the page: no style of its own, colours by name, distinct ids, and said in words.

The page's content security policy lets no style through but the page's own, so every declaration that matplotlib writes
becomes an attribute, and every colour of the palette a class: one drawing is right on paper and in the dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

from server.html_report.palette import LIGHT
from server.html_report.visible import plain

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_NAMES = {colour: name for name, colour in LIGHT.items()}
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_REFERENCE = re.compile(r"^url\(#(.+)\)$")
_KEPT = (
    "fill-opacity", "fill-rule", "font-size", "font-weight", "opacity", "stroke-dasharray", "stroke-linecap",
    "stroke-linejoin", "stroke-opacity", "stroke-width", "text-anchor",
)  # fmt: skip
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedcorpus",
    # A code's value may hold dollar signs, which are no formula.
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "path.simplify": True,
}

TIP = "tip-"
"""Start of the gid of an artist that has words to show when it is pointed at."""


def settings() -> dict[Any, Any]:
    """matplotlib's settings while a chart is made and written."""
    return dict(_SETTINGS)


def to_svg(figure: Figure, name: str, title: str, description: str, tips: Mapping[str, str]) -> Markup:
    """A figure as an ``svg`` element.

    Parameters
    ----------
    name
        Of letters, digits and ``-``; distinct on the page: ids begin with it.
    title, description
        What a screen reader says: the name of the chart, and what it shows.
    tips
        gid of an artist -> words shown when it is pointed at.
    """
    root = ET.fromstring(_written(figure))  # noqa: S314 - what matplotlib wrote a moment ago
    _drop(root, "metadata", "style")
    referenced = _references(root)
    for element in root.iter():
        _restyle(element)
        _rename(element, name, referenced, tips)
    for attribute in ("width", "height", "version", "id"):
        root.attrib.pop(attribute, None)
    root.set("class", "chart")
    root.set("role", "img")
    root.set("focusable", "false")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    for position, (tag, words) in enumerate((("title", title), ("desc", description))):
        said = ET.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        said.text = plain(words)
        root.insert(position, said)
    _drop_empty_groups(root)
    ET.register_namespace("", _SVG)
    text = ET.tostring(root, encoding="unicode").replace(f' xmlns="{_SVG}"', "")
    # An XML writer escaped every text and attribute in it.
    return Markup(re.sub(r"\n\s*", "\n", text))  # noqa: S704


def _written(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with mpl.rc_context(settings()), warnings.catch_warnings():
        # Which letters matplotlib's own font lacks doesn't matter: the reader's fonts are used.
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _drop(root: ET.Element, *tags: str) -> None:
    names = {f"{{{_SVG}}}{tag}" for tag in tags}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in names:
                parent.remove(child)


def _references(root: ET.Element) -> set[str]:
    """Ids that something in the drawing refers to."""
    found = {element.get(_XLINK, "").removeprefix("#") for element in root.iter()}
    for element in root.iter():
        for value in [*element.attrib.values(), *_declarations(element).values()]:
            if reference := _REFERENCE.match(value):
                found.add(reference[1])
    return found - {""}


def _declarations(element: ET.Element) -> dict[str, str]:
    pairs = (part.split(":", 1) for part in element.get("style", "").split(";") if ":" in part)
    return {name.strip(): value.strip() for name, value in pairs}


def _restyle(element: ET.Element) -> None:
    declared = _declarations(element)
    element.attrib.pop("style", None)
    if font := re.match(r"(?:\w+ )*?([\d.]+)px", declared.pop("font", "")):
        declared["font-size"] = font[1]
    for paint, prefix in (("fill", "f"), ("stroke", "s")):
        value = declared.get(paint) or element.attrib.pop(paint, None)
        if value in _NAMES:
            element.set("class", f"{element.get('class', '')} {prefix}-{_NAMES[value]}".strip())
        elif value is not None:
            element.set(paint, value)
    if (clip := declared.get("clip-path")) is not None:
        element.set("clip-path", clip)
    for name in _KEPT:
        if name in declared:
            element.set(name, declared[name].removesuffix("px"))
    for name in ("d", "transform", "x", "y", "width", "height", "points", "stroke-width"):
        if name in element.attrib:
            element.set(name, _LONG_NUMBER.sub(lambda n: f"{float(n[0]):.2f}", element.attrib[name]))


def _rename(element: ET.Element, name: str, referenced: set[str], tips: Mapping[str, str]) -> None:
    own = element.attrib.pop("id", None)
    if own is not None and own in tips:
        words = ET.Element(f"{{{_SVG}}}title")
        words.text = plain(tips[own])
        element.insert(0, words)
    if own in referenced:
        element.set("id", f"{name}-{own}")
    if (target := element.attrib.pop(_XLINK, None)) is not None:
        element.set("href", f"#{name}-{target.removeprefix('#')}")
    for attribute, value in list(element.attrib.items()):
        if reference := _REFERENCE.match(value):
            element.set(attribute, f"url(#{name}-{reference[1]})")


def _drop_empty_groups(root: ET.Element) -> None:
    group = f"{{{_SVG}}}g"
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == group and not len(child):
                parent.remove(child)
