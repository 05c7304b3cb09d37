"""Runs every measure, and checks first that the texts can be compared at all."""

from __future__ import annotations

from common.errors import DataError
from server.evaluation.material import Material, TooFewTextsError
from server.evaluation.measures import MEASURES
from server.evaluation.texts import Texts, check_apart, check_labels, keys
from server.quality import Quality, QualityNumber

FEWEST = 20
"""Texts of a corpus, and test texts."""

CAUTION = (
    "These numbers carry no noise. Of public or test data they may be shown to anyone; of private documents they are a "
    "release outside of every budget: only a site may compute them, for its own operator."
)


def evaluate(material: Material) -> Quality:
    """All numbers of a corpus. What can't be measured on these texts is left out, and the note says why.

    Raises
    ------
    DataError
        If the texts can't be compared: too few, one label only, no label in common, or the same on both sides.
    MissingExtraError
        If a library isn't installed.
    """
    check(material)
    numbers: list[QualityNumber] = []
    left_out: list[str] = []
    for measure in MEASURES.values():
        try:
            numbers += measure(material)
        except TooFewTextsError as reason:
            left_out.append(str(reason))
    return Quality(numbers=tuple(numbers), note=" ".join([_compared(material), CAUTION, *(f"{s}." for s in left_out)]))


def check(material: Material) -> None:
    """Raise DataError if the texts can't be compared."""
    corpus, test, train, holdout = material.corpus, material.test, material.train, material.holdout
    for texts in (corpus, test):
        if len(texts) < FEWEST:
            raise DataError(f"{texts.name}: {len(texts)} texts can be used; at least {FEWEST} are needed")
    check_labels(test)
    _check_not_the_same(corpus, test)
    if train is not None:
        check_apart(train, test)
        if holdout is not None:
            check_apart(train, holdout)


def _check_not_the_same(corpus: Texts, test: Texts) -> None:
    own, others = set(keys(corpus)), set(keys(test))
    if len(own & others) > len(own) / 2:
        raise DataError(
            f"{corpus.name}: {len(own & others)} of its {len(own)} different texts are in {test.name}, word for word; "
            "test texts must have had no part in the corpus"
        )


def _compared(material: Material) -> str:
    sides = {"tested on": material.test, "made from": material.train, "held out": material.holdout}
    sides["floor"] = material.floor
    words = [f"{len(material.corpus)} texts of {material.corpus.name}"]
    words += [f"{what} {len(texts)} of {texts.name}" for what, texts in sides.items() if texts is not None]
    out = sum(t.left_out for t in (material.corpus, *sides.values()) if t is not None)
    return "; ".join([*words, *([f"{out} rows couldn't be used"] if out else [])]) + "."
