"""Texts of the corpus for the report's browser: spread evenly over the codes, bounded in number and length."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from server.corpus import CorpusText, iterate_corpus
from server.html_report.material import Material
from server.html_report.view import Browser, Text
from server.html_report.visible import marked, shortened
from server.html_report.words import count, several

MOST_TEXTS = 200
MOST_CHARACTERS = 1500
"""Of a text; beyond that it is cut, and said so."""
MOST_MARKUP = 9000
"""Characters of a text's markup: one of hidden characters only is cut earlier, so that the page's size has a bound."""
MOST_OF_LABEL = 200

_ORIGINS = {"candidate": "chosen by the votes", "top-up": "generated after the vote", "repeat": "a repeat"}


def browser(material: Material) -> Browser:
    """Texts to look at. Of each code they are taken at even distances, so the same run gives the same."""
    made = [code.made for code in material.summary.codes]
    share = _share_out(made, MOST_TEXTS)
    wanted = {code: _places(made[code], of) for code, of in share.items()}
    seen: dict[int, int] = {}
    chosen: list[CorpusText] = []
    for text in iterate_corpus(material.workspace, material.study.codes):
        place = seen.get(text.code, 0)
        seen[text.code] = place + 1
        if place in wanted.get(text.code, ()):
            chosen.append(text)
    codes = sorted({text.code for text in chosen})
    where = {code: i for i, code in enumerate(codes)}
    texts = [_text(where[text.code], text, material) for text in chosen]
    total, with_texts = sum(seen.values()), len(seen)
    reading = f"All {several(total, 'text')} of the corpus are here."
    if len(texts) < total:
        reading = (
            f"{count(len(texts))} of {several(total, 'text')} are here, from {count(len(codes))} of "
            f"{several(with_texts, 'code')} that have any: of each code about as many, at even distances. The rest is "
            f"in {material.workspace.corpus_parquet.name}."
        )
    labels = [shortened(material.summary.codes[code].label, MOST_OF_LABEL) for code in codes]
    return Browser(labels, texts, reading)


def _text(code: int, text: CorpusText, material: Material) -> Text:
    label = _ORIGINS.get(text.origin, text.origin)
    if text.origin == "candidate" and not material.ballots:
        label = "from the pool, without votes"
    shown = min(len(text.text), MOST_CHARACTERS)
    while len(markup := marked(text.text[:shown])) > MOST_MARKUP:
        shown //= 2
    left = len(text.text) - shown
    return Text(code, markup, label, f"… {several(left, 'more character')}" if left else "")


def _share_out(made: list[int], most: int) -> Mapping[int, int]:
    """How many texts of each code: one each in turn, largest codes first, until none or no room is left."""
    order = sorted((code for code, n in enumerate(made) if n), key=lambda code: (-made[code], code))[:most]
    given = dict.fromkeys(order, 0)
    left, open_ = most, order
    while left and open_:
        for code in open_[:left]:
            given[code] += 1
        left -= min(left, len(open_))
        open_ = [code for code in open_ if given[code] < made[code]]
    return given


def _places(made: int, of: int) -> frozenset[int]:
    return frozenset(int(place) for place in np.linspace(0, made - 1, of).round())
