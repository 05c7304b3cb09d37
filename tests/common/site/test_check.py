"""What an operator is told before a study starts: one sentence, with the numbers, on this machine only."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import DataError, MissingExtraError, SiteConfigError, UserError
from common.site.check import STRONG_LIBRARIES, SiteCheck, check_site
from common.site.config import Site
from common.site.formats import Problem
from common.study import Study

SECRET = "Mrs Zwiebelfisch of bed 12"


def study(unit: str = "record", min_documents: int = 10) -> Study:
    return Study.model_validate(
        {
            "name": "test",
            "codes": {"attributes": [{"name": "topic", "values": ["Staff", "Food", "Parking"]}]},
            "privacy": {"epsilon": 4, "delta": 1e-5, "unit": unit},
            "generator": {"base": "tiny"},
            "training": {"batch_size": 4},
            "federation": {"min_documents": min_documents},
        }
    )


def site(folder: Path, rows: list[dict[str, Any]], size_class: int = 10, tier: str = "weak", **more: Any) -> Site:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Site.model_validate(
        {
            "name": "hospital",
            "tier": tier,
            "size_class": size_class,
            "state": "/state",
            "documents": {"path": path, "patient_column": "patient"} | more,
            "policy": {"max_epsilon": 10, "max_delta": 1e-4},
        }
    )


def rows(number: int, topic: str = "Staff") -> list[dict[str, Any]]:
    return [{"text": f"{SECRET} {i}", "topic": topic, "patient": i // 2} for i in range(number)]


def test_site_that_can_take_part_learns_its_sizes(tmp_path: Path) -> None:
    mixed = [*rows(12), *rows(3, "Food"), *rows(2, "Elsewhere"), {"text": "", "topic": "Food", "patient": 1}]
    found = check_site(site(tmp_path, mixed), study())
    assert (found.documents, found.units, found.undeclared) == (15, 15, 2)
    assert found.problems == {Problem.NO_TEXT.value: 1}
    assert found.codes.tolist() == [12, 3, 0]


def test_the_policys_own_minimum_counts_too(tmp_path: Path) -> None:
    strict = site(tmp_path, rows(15), size_class=15)
    strict = strict.model_copy(update={"policy": strict.policy.model_copy(update={"min_documents": 16})})
    with pytest.raises(SiteConfigError, match=r"at least 16 .*policy.min_documents"):
        check_site(strict, study())
    with pytest.raises(DataError, match=r"holds 15 units.*need at least 16"):
        check_site(strict.model_copy(update={"size_class": 16}), study())


def test_repr_of_a_check_shows_sizes_only(tmp_path: Path) -> None:
    shown = repr(check_site(site(tmp_path, rows(12)), study()))
    assert shown == "SiteCheck(<12 private documents of 12 units>)"


@pytest.mark.parametrize(
    ("number", "size_class", "unit", "error", "parts"),
    [
        (9, 10, "record", DataError, ("holds 9 units (unit is the record)", "at least 10")),
        (18, 10, "patient", DataError, ("holds 9 units (unit is the patient)", "at least 10")),
        (12, 13, "record", SiteConfigError, ("size_class is 13", "holds 12 units", "10 to 12 is accepted")),
        (24, 13, "patient", SiteConfigError, ("size_class is 13", "holds 12 units")),
        (12, 9, "record", SiteConfigError, ("size_class is 9", "at least 10")),
    ],
)
def test_too_few_units_and_false_declarations_are_refused_with_both_numbers(
    tmp_path: Path, number: int, size_class: int, unit: str, error: type[UserError], parts: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        check_site(site(tmp_path, rows(number), size_class), study(unit))
    assert all(part in str(caught.value) for part in (*parts, "'hospital'"))
    assert SECRET not in str(caught.value)


def test_exactly_as_many_units_as_declared_is_accepted(tmp_path: Path) -> None:
    assert check_site(site(tmp_path, rows(10), 10), study()).units == 10


def test_no_usable_document_says_where_the_rows_went(tmp_path: Path) -> None:
    useless = [*rows(3, "Elsewhere"), {"text": "", "topic": "Food"}, {"text": "", "topic": "Food"}]
    with pytest.raises(DataError) as caught:
        check_site(site(tmp_path, [*useless, {"text": "A", "topic": ""}]), study())
    sentence = str(caught.value)
    assert "3 rows have values that it doesn't declare, 3 are malformed (mostly: the text is empty)" in sentence


def test_unreadable_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'note' is missing.*documents\.text_column"):
        check_site(site(tmp_path, rows(12), text_column="note"), study())


def test_strong_site_needs_every_training_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = {name: importlib.machinery.ModuleSpec(name, None) for name in STRONG_LIBRARIES}
    _install_only(monkeypatch, present)
    assert isinstance(check_site(site(tmp_path, rows(12), tier="strong"), study()), SiteCheck)
    for name in STRONG_LIBRARIES:
        _install_only(monkeypatch, {other: spec for other, spec in present.items() if other != name})
        with pytest.raises(MissingExtraError, match=rf'{name} can\'t be found; pip install "fedcorpus\[strong\]"'):
            check_site(site(tmp_path, rows(12), tier="strong"), study())


def test_weak_site_needs_no_training_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_only(monkeypatch, {})
    assert check_site(site(tmp_path, rows(12)), study()).documents == 12


def test_progress_of_the_reading_is_passed_on(tmp_path: Path) -> None:
    seen: list[int] = []
    check_site(site(tmp_path, rows(12)), study(), progress=seen.append)
    assert seen == [12]


def _install_only(monkeypatch: pytest.MonkeyPatch, present: dict[str, Any]) -> None:
    for name in STRONG_LIBRARIES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", present.get)
