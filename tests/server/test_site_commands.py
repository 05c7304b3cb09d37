"""What a hospital's operator sees of a run that asked for less than was planned, and how it is closed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from client_strong.client_app import prepared
from common.models.generator import Generator
from common.protocol import TrainRequest
from common.site.config import Site
from common.site.door import Door
from common.site.ledger import Ledger
from common.study import Study
from tests.hospitals import rows, small_study, write_site, write_study

FEDCORPUS = str(Path(sys.executable).parent / "fedcorpus")


def _fedcorpus(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FEDCORPUS, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )


def _budget(site: Path) -> dict[str, object]:
    shown = json.loads(_fedcorpus("site", "budget", site, "--json", cwd=site.parent).stdout)
    assert len(shown["runs"]) == 1
    return {**shown["runs"][0], "renyi": shown["renyi"]["spent"], "spent": shown["epsilon"]["spent"]}


@pytest.fixture
def asked_once(tmp_path: Path, tiny_model: Path) -> Path:
    """Site file of a strong site that answered the first of three rounds."""
    study = Study.load(write_study(tmp_path, small_study(tiny_model, training={"rounds": 3})))
    file = write_site(tmp_path, "north", "strong", rows(40))
    generator, site = Generator(study.generator), Site.load(file)
    request = TrainRequest(study, "0123abcd", 1, generator.adapter(), generator.frozen_sha256())
    Door(site).release(request, lambda: prepared(site, request))
    return file


def test_the_budget_shows_what_was_charged_and_what_was_given_out(asked_once: Path) -> None:
    shown = _budget(asked_once)
    assert 7.9 < shown["epsilon"] <= 8  # type: ignore[operator]
    assert 0 < shown["epsilon_given_out"] < 0.9 * shown["epsilon"]  # type: ignore[operator]
    assert shown["closed"] is False
    assert "what a run has given out" in _fedcorpus("site", "budget", asked_once, cwd=asked_once.parent).stdout


def test_closing_counts_what_was_given_out_in_the_renyi_filter_alone(asked_once: Path) -> None:
    before = _budget(asked_once)
    closed = _fedcorpus("site", "close", asked_once, "0123", "--by", "dpo", cwd=asked_once.parent)
    assert closed.returncode == 0, closed.stderr
    assert "closed: run 0123abcd" in closed.stdout
    after = _budget(asked_once)
    assert after["closed"] is True
    assert after["spent"] == before["spent"]
    assert after["renyi"] < before["renyi"]  # type: ignore[operator]
    with Ledger.of(Site.load(asked_once)) as ledger:
        assert ledger.export("north")["events"][-1]["content"]["person"] == "dpo"
    again = _fedcorpus("site", "close", asked_once, "0123", cwd=asked_once.parent)
    assert again.returncode == 0
    assert len(_events(asked_once)) == 4, "closing twice is closing once"


@pytest.mark.parametrize(("max_tokens", "cut"), [(48, 41), (100, 1), (256, 0)])
def test_site_check_counts_the_documents_that_the_model_cuts(
    tmp_path: Path, tiny_model: Path, max_tokens: int, cut: int
) -> None:
    write_study(tmp_path, small_study(tiny_model, generator={"max_tokens": max_tokens}))
    long = {**rows(1)[0], "text": "The staff were kind. " * 20}
    site = write_site(tmp_path, "north", "strong", [*rows(40, 1), long])
    shown = _fedcorpus("site", "check", site, "--study", "study.toml", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert f"the model is there, on cpu; {cut} documents are longer than the {max_tokens} tokens" in shown.stdout


def test_site_check_refuses_a_model_that_is_not_the_studys(tmp_path: Path, tiny_model: Path) -> None:
    write_study(tmp_path, small_study(tiny_model, generator={"sha256": "0" * 64}))
    site = write_site(tmp_path, "north", "strong", rows(40))
    shown = _fedcorpus("site", "check", site, "--study", "study.toml", cwd=tmp_path)
    assert shown.returncode == 2
    assert "the study pins files of digest 000" in shown.stderr


@pytest.mark.parametrize("digits", ["zzz", ""])
def test_closing_a_run_that_is_not_there_is_one_sentence(asked_once: Path, digits: str) -> None:
    result = _fedcorpus("site", "close", asked_once, digits, cwd=asked_once.parent)
    assert result.returncode == 2
    assert f"{digits!r} names 0 of the 1 runs that were charged" in result.stderr
    assert len(_events(asked_once)) == 3


def _events(site: Path) -> list[object]:
    with Ledger.of(Site.load(site)) as ledger:
        return list(ledger.export("north")["events"])
