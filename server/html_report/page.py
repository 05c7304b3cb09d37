"""The page as a whole: key figures, sections in order, and the policy that lets nothing but the page's own code run."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from server.html_report import corpus_sections, record_section, site_sections
from server.html_report.material import Material
from server.html_report.script import SCRIPT
from server.html_report.style import style_sheet
from server.html_report.template import PAGE
from server.html_report.view import KeyFigure, Page
from server.html_report.visible import shortened
from server.html_report.words import count, number, several
from server.report import at_most

MOST_WARNINGS = 50
LONGEST_WORDS = 2000
"""Characters of a cell or a paragraph."""


def page_of(material: Material) -> Page:
    """Everything that the page shows."""
    sections = (
        corpus_sections.asked_and_came, corpus_sections.proportions, corpus_sections.votes, site_sections.privacy,
        site_sections.what_left, site_sections.training, corpus_sections.quality, corpus_sections.texts,
        record_section.record,
    )  # fmt: skip
    summary = material.summary
    when = ""
    if material.started is not None:
        when = f" · started {datetime.fromtimestamp(material.started, UTC):%Y-%m-%d %H:%M} UTC"
    warnings = list(summary.warnings[:MOST_WARNINGS])
    if len(summary.warnings) > len(warnings):
        warnings.append(f"{count(len(summary.warnings) - len(warnings))} more notes are in summary.json.")
    return Page(
        title=f"Study {summary.study}",
        subtitle=f"run {summary.run_id[:12]} · study {summary.study_sha256[:12]}{when}",
        figures=_key_figures(material),
        sections=[section(material) for section in sections],
        warnings=warnings,
    )


def render(page: Page) -> str:
    """The page in HTML. Whatever isn't markup already is one line of escaped text, hidden characters made visible."""
    style, script = style_sheet(), SCRIPT
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=False, keep_trailing_newline=True
    )
    return environment.from_string(PAGE).render(
        page=page,
        # Our own constants.
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        policy=_policy(style, script),
    )


def _shown(value: object) -> object:
    return value if isinstance(value, Markup) else shortened(str(value), LONGEST_WORDS)


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _key_figures(material: Material) -> list[KeyFigure]:
    summary = material.summary
    wanted, made = sum(c.wanted for c in summary.codes), sum(c.made for c in summary.codes)
    missing = sum(max(0, c.wanted - c.made) for c in summary.codes)
    repeated = sum(c.repeated for c in summary.codes)
    figures = [
        KeyFigure(count(made), "texts made", "as many as asked" if made == wanted else f"of {count(wanted)} asked"),
        KeyFigure(
            count(len(summary.codes)), "control codes", f"{count(sum(c.made > 0 for c in summary.codes))} with texts"
        ),
    ]
    for tier in ("strong", "weak"):
        sites = [site for site in summary.sites if site.tier == tier]
        answered = sum(site.answers > 0 for site in sites)
        remark = "all answered" if answered == len(sites) else f"{count(answered)} answered"
        figures.append(KeyFigure(count(len(sites)), f"{tier} sites", remark if sites else "", answered < len(sites)))
    return [
        *figures,
        KeyFigure(at_most(summary.epsilon), "ε at most", f"of a site, a {summary.unit}"),
        KeyFigure(number(summary.delta), "δ"),
        KeyFigure(
            count(missing), "texts missing", f"{several(repeated, 'repeat')}" if repeated else "no repeats", missing > 0
        ),
    ]
