"""Verification: a claim holds when every site's own ledger confirms it, and every kind of forgery is named."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.errors import DataError, LedgerError
from common.privacy.accounting import SubsampledGaussian, describe
from common.site.config import Site
from common.site.journal import chain_hash
from common.site.ledger import Ledger
from common.site.plan import remaining_plan, strong_plan
from common.study import Study
from server.server_app import open_run, run_study
from server.verify import read_exports, verify
from server.verify_view import render_verification
from tests.hospitals import rows, small_study, write_site, write_study
from tests.in_process import InProcessGrid

TIERS = {1: ("north", "strong"), 2: ("east", "weak")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A finished run's folder, and the ledger export of each of its sites."""
    folder = tmp_path_factory.mktemp("verified")
    files = {n: write_site(folder, name, tier, rows(40, 40 * n)) for n, (name, tier) in TIERS.items()}
    study = small_study(tiny_model, federation={"expected_sites": 2})
    run = open_run(str(write_study(folder, study)), str(folder / "run"))
    run_study(InProcessGrid(files), run)
    exports = {}
    for file in files.values():
        with Ledger.of(Site.load(file)) as ledger:
            name = Site.load(file).name
            exports[name] = json.loads(json.dumps(ledger.export(name)))
    return folder / "run", exports


def _written(folder: Path, exports: dict[str, dict[str, Any]]) -> Path:
    target = folder / "ledgers"
    target.mkdir()
    for name, export in exports.items():
        (target / f"{name}.json").write_text(json.dumps(export))
    return target


def _copy(exports: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: json.loads(json.dumps(export)) for name, export in exports.items()}


def _rechained(export: dict[str, Any]) -> None:
    """Make a forged ledger's chain whole again, as a forger would."""
    last = ""
    for number, event in enumerate(export["events"], start=1):
        event |= {"sequence": number, "previous": last}
        event["hash"] = last = chain_hash(last, number, event["kind"], event["content"])


def test_an_honest_runs_claim_holds_by_two_accountants(finished: Any, tmp_path: Path) -> None:
    run, exports = finished
    verification = verify(run, read_exports([_written(tmp_path, exports)]))
    assert verification.holds
    assert {site.site: site.releases for site in verification.sites} == {"north": 2, "east": 1}
    for site in verification.sites:
        assert site.accountant is not None
        assert site.second == pytest.approx(site.accountant, abs=0.01)
        assert site.second <= 8.01


@pytest.mark.parametrize(("rounds", "holds"), [([2], True), ([1, 2], True), ([1], False)])
def test_a_site_that_joined_late_is_charged_for_the_rounds_that_were_left(
    finished: Any, tmp_path: Path, rounds: list[int], holds: bool
) -> None:
    """A ledger that charges fewer steps than the rounds it plans is a forgery."""
    run, exports = finished
    study = Study.from_canonical((run / "study.json").read_text())
    forged = _copy(exports)
    whole = strong_plan(study, 20)
    late = remaining_plan(whole, study, 2) if rounds != [1, 2] else whole
    for event in forged["north"]["events"]:
        if event["kind"] == "reservation":
            event["content"] |= {"parts": ["profile", *(f"train/{r}" for r in rounds)], "epsilon": late.epsilon}
            event["content"]["mechanisms"] = [describe(m) for m in late.mechanisms]
    forged["north"]["events"] = [
        event
        for event in forged["north"]["events"]
        if event["kind"] != "release" or event["content"]["key"] in {f"train/{r}" for r in rounds}
    ]
    for event in forged["north"]["events"]:
        if event["kind"] == "release" and len(rounds) == 1:
            event["content"]["parts"] = [f"train/{rounds[0]}", "profile"]
    _rechained(forged["north"])
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    summary = json.loads((folder / "summary.json").read_text())
    for site in summary["sites"]:
        site["answers"] = len(rounds) if site["name"] == "north" else site["answers"]
    (folder / "summary.json").write_text(json.dumps(summary))
    verification = verify(folder, read_exports([_written(tmp_path, forged)]))
    north = next(site for site in verification.sites if site.site == "north")
    assert verification.holds == holds, north
    if rounds == [2]:
        assert north.second < 0.9 * whole.epsilon
    if not holds:
        assert "other mechanisms than the study asks for" in north.problem


def test_a_site_that_was_asked_in_vain_and_not_charged_is_no_obstacle(finished: Any, tmp_path: Path) -> None:
    run, exports = finished
    vain, folder = _copy(exports), tmp_path / "run"
    folder.mkdir()
    claims = json.loads((run / "summary.json").read_text())
    for site in claims["sites"]:
        if site["name"] == "east":
            site |= {"answers": 0, "outcome": "no answer in time"}
    (folder / "summary.json").write_text(json.dumps(claims))
    (folder / "study.json").write_text((run / "study.json").read_text())
    del vain["east"]["events"][1:]
    assert verify(folder, read_exports([_written(tmp_path, vain)])).holds
    vain["east"]["site"] = "somebody else"
    (tmp_path / "ledgers" / "east.json").write_text(json.dumps(vain["east"]))
    verification = verify(folder, read_exports([tmp_path / "ledgers"]))
    assert not verification.holds
    assert "whether it was charged" in verification.sites[1].problem


def _reservation(export: dict[str, Any]) -> dict[str, Any]:
    return next(e["content"] for e in export["events"] if e["kind"] == "reservation")


def _less_noise(exports: dict[str, Any]) -> None:
    for mechanism in _reservation(exports["north"])["mechanisms"]:
        mechanism[next(k for k in ("noise_multiplier", "scale") if k in mechanism)] *= 0.9


def _smaller_claim_in_the_ledger(exports: dict[str, Any]) -> None:
    _reservation(exports["north"])["mechanisms"] = [describe(SubsampledGaussian(50.0, 0.01, 1))]


def _no_ledger(exports: dict[str, Any]) -> None:
    del exports["east"]


def _two_ledgers(exports: dict[str, Any]) -> None:
    exports["copy"] = json.loads(json.dumps(exports["east"]))


def _a_part_twice(exports: dict[str, Any]) -> None:
    events = exports["east"]["events"]
    events.append(json.loads(json.dumps(events[-1])))


def _a_part_unplanned(exports: dict[str, Any]) -> None:
    exports["east"]["events"][-1]["content"]["parts"].append("train/1")


def _an_answer_missing(exports: dict[str, Any]) -> None:
    exports["north"]["events"].pop()


def _another_unit(exports: dict[str, Any]) -> None:
    _reservation(exports["north"])["unit"] = "patient"


def _no_mechanism(exports: dict[str, Any]) -> None:
    _reservation(exports["north"])["mechanisms"] = [{"mechanism": "magic"}]


def _a_larger_delta(exports: dict[str, Any]) -> None:
    _reservation(exports["north"])["delta"] = 1e-2


@pytest.mark.parametrize(
    ("forge", "site", "said"),
    [
        (_less_noise, "north", "other mechanisms"),
        (_smaller_claim_in_the_ledger, "north", "other mechanisms"),
        (_no_ledger, "east", "no ledger that was given knows of it"),
        (_two_ledgers, "east", "2 ledgers charge"),
        (_a_part_twice, "east", "gave out"),
        (_a_part_unplanned, "east", "gave out"),
        (_an_answer_missing, "north", "counts 2 answers, its ledger 1"),
        (_another_unit, "north", "unit 'patient'"),
        (_no_mechanism, "north", "can't be accounted for"),
        (_a_larger_delta, "north", "less was claimed"),
    ],
)
def test_a_forged_ledger_does_not_confirm_the_claim(
    finished: Any, tmp_path: Path, forge: Callable[[dict[str, Any]], None], site: str, said: str
) -> None:
    run, exports = finished
    forged = _copy(exports)
    forge(forged)
    for export in forged.values():
        _rechained(export)
    verification = verify(run, read_exports([_written(tmp_path, forged)]))
    assert not verification.holds
    problems = {verdict.site: verdict.problem for verdict in verification.sites}
    assert said in problems[site]


def test_a_summary_that_claims_less_than_was_spent_is_not_confirmed(finished: Any, tmp_path: Path) -> None:
    run, exports = finished
    claims = json.loads((run / "summary.json").read_text())
    forged = tmp_path / "run"
    forged.mkdir()
    (forged / "study.json").write_text((run / "study.json").read_text())
    (forged / "summary.json").write_text(json.dumps(claims | {"epsilon": 4.0}))
    verification = verify(forged, read_exports([_written(tmp_path, exports)]))
    assert not verification.holds
    assert all("less was claimed" in site.problem for site in verification.sites)


def test_what_is_not_confirmed_is_said_in_words(finished: Any, tmp_path: Path) -> None:
    run, exports = finished
    for number, (given_, said) in enumerate(
        [(exports, "The claim HOLDS."), ({"east": exports["east"]}, "NOT confirmed")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        console = Console(width=80, file=io.StringIO())
        render_verification(verify(run, read_exports([_written(folder, given_)])), console)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert said in shown
        assert ("north: it answered, and no ledger that was given knows of it" in shown) == bool(number)


def test_a_changed_event_breaks_the_chain(finished: Any, tmp_path: Path) -> None:
    _, exports = finished
    forged = _copy(exports)
    _reservation(forged["east"])["epsilon"] = 0.1
    with pytest.raises(LedgerError, match=r"east.json: event 2 doesn't fit"):
        read_exports([_written(tmp_path, forged)])


def test_an_export_that_begins_in_the_middle_is_refused(finished: Any, tmp_path: Path) -> None:
    _, exports = finished
    forged = _copy(exports)
    del forged["east"]["events"][0]
    _rechained(forged["east"])
    with pytest.raises(LedgerError, match="begin"):
        read_exports([_written(tmp_path, forged)])


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": 1, "events": []}', '{"format": 2, "events": [1]}', '{"format": 2, "events": 3}',
     '{"format": 2, "ledger": "a", "events": [{"sequence": 1, "kind": "a", "content": 3, "previous": "", "hash": ""}]}',
     "\ud800"],
)  # fmt: skip
def test_a_file_that_is_no_export_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "no-export.json"
    file.write_text(content, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(DataError, match=r"no-export.json"):
        read_exports([file])
    with pytest.raises(DataError, match="no-such"):
        read_exports([tmp_path / "no-such.json"])
    with pytest.raises(DataError, match="no exported ledger"):
        read_exports([])


def test_a_folder_without_a_finished_run_is_named(finished: Any, tmp_path: Path) -> None:
    run, exports = finished
    read = read_exports([_written(tmp_path, exports)])
    with pytest.raises(DataError, match="no run that has finished"):
        verify(tmp_path, read)
    other = tmp_path / "other"
    other.mkdir()
    (other / "summary.json").write_text((run / "summary.json").read_text())
    study = json.loads((run / "study.json").read_text())
    (other / "study.json").write_text(json.dumps(study | {"name": "another"}))
    with pytest.raises(DataError, match="folder was changed"):
        verify(other, read)
