"""The command line: bad input of every kind gets one plain sentence and exit code 2 before anything is spent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import WireCode
from common.protocol import CensusRequest
from common.site.config import Site
from common.site.door import Door
from common.study import Study
from server.server_app import open_run, run_study
from tests.hospitals import rows, small_study, write_site, write_study
from tests.in_process import InProcessGrid

FEDCORPUS = str(Path(sys.executable).parent / "fedcorpus")


def _fedcorpus(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FEDCORPUS, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def good(tmp_path: Path, tiny_model: Path) -> Path:
    """A folder with a study and four sites that would run."""
    write_study(tmp_path, small_study(tiny_model))
    for number, (name, tier) in enumerate([("north", "strong"), ("south", "strong"), ("east", "weak")]):
        write_site(tmp_path, name, tier, rows(40, number * 40))
    return tmp_path


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


CASES: dict[str, tuple[Any, list[str]]] = {
    "unknown key in a study": (
        lambda d: _edit(d / "study.toml", "[pool]", "[pool]\nsiez = 3"), ["study.toml", "pool.siez", "unknown key"]
    ),
    "a code with no values": (
        lambda d: _edit(d / "study.toml", '["staff", "parking"]', "[]"), ["codes.attributes.0.values", "no values"]
    ),
    "epsilon of zero": (
        lambda d: _edit(d / "study.toml", "epsilon = 8.0", "epsilon = 0"), ["privacy.epsilon", "0", "greater than 0"]
    ),
    "a negative epsilon": (
        lambda d: _edit(d / "study.toml", "epsilon = 8.0", "epsilon = -1.5"), ["privacy.epsilon", "-1.5"]
    ),
    "a study that isn't TOML": (lambda d: (d / "study.toml").write_text("name = ["), ["study.toml", "not valid TOML"]),
    "no study": (lambda d: (d / "study.toml").unlink(), ["study.toml", "no such file"]),
    "a missing column": (
        lambda d: _edit(d / "sites" / "east.toml", "[documents]", '[documents]\ntext_column = "note"'),
        ["documents.parquet", "'note'", "'text'"],
    ),
    "an empty file": (
        lambda d: (d / "hospitals" / "east" / "documents.parquet").write_bytes(b""), ["documents.parquet", "empty"]
    ),
    "too few documents": (
        lambda d: _edit(d / "study.toml", "min_documents = 20", "min_documents = 50")
        or [_edit(f, "size_class = 20", "size_class = 50") for f in (d / "sites").glob("*.toml")],
        ["40", "50"],
    ),
    "a size class that isn't true": (
        lambda d: _edit(d / "sites" / "east.toml", "size_class = 20", "size_class = 41"), ["'east'", "41", "40"]
    ),
    "a model folder that isn't there": (
        lambda d: _edit(d / "study.toml", json.dumps(_base(d)), '"/nowhere/model"'),
        ["generator.base", "/nowhere/model"],
    ),
    "a folder that isn't a model": (
        lambda d: _edit(d / "study.toml", json.dumps(_base(d)), json.dumps(str(d / "sites"))),
        ["generator.base", "config.json"],
    ),
    "a model package that isn't installed": (
        lambda d: _edit(d / "study.toml", json.dumps(_base(d)), '"package:no-such-model"'),
        ["no-such-model", "pip install"],
    ),
    "an unknown embedder": (
        lambda d: _edit(d / "study.toml", "[pool]", '[voting]\nembedder = "word2vec"\n[pool]'),
        ["word2vec", "wordllama"],
    ),
    "smoothing with an embedder that isn't the pinned one": (
        lambda d: _edit(
            d / "study.toml", "[pool]",
            f'[voting]\nembedder_sha256 = "{"0" * 64}"\n[pool]',
        ) or _edit(d / "study.toml", "[corpus]", '[corpus]\nsmoothing = "kernel"'),
        ["voting.embedder", "digest"],
    ),
    "no policy": (
        lambda d: _edit(d / "sites" / "east.toml", "[policy]\nmax_epsilon = 20.0\nmax_delta = 1e-3", ""),
        ["policy", "missing"],
    ),
    "a relative path": (
        lambda d: _edit(d / "sites" / "east.toml", f'state = "{d}/', 'state = "'), ["state", "absolute"]
    ),
    "two sites of one name": (
        lambda d: _edit(d / "sites" / "east.toml", 'name = "east"', 'name = "north"'), ["'north'", "distinct"]
    ),
    "a name of our own files": (
        lambda d: _edit(d / "sites" / "east.toml", 'name = "east"', 'name = "superlink"'),
        ["'superlink'", "can't be named"],
    ),
    "no sites": (lambda d: [f.unlink() for f in (d / "sites").glob("*.toml")], ["sites", "no site files"]),
}  # fmt: skip


def _base(folder: Path) -> str:
    for line in (folder / "study.toml").read_text().splitlines():
        if line.startswith("base = "):
            return str(json.loads(line.removeprefix("base = ")))
    raise AssertionError


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence_and_exit_code_2_before_anything_is_made(good: Path, case: str) -> None:
    spoil, expected = CASES[case]
    spoil(good)
    result = _fedcorpus("simulate", "study.toml", "--sites", "sites", "--out", "run", cwd=good)
    assert result.returncode == 2, result.stdout + result.stderr
    said = " ".join(result.stderr.split())
    assert all(word in said for word in expected), said
    assert "Traceback" not in result.stderr
    assert not (good / "run").exists(), "nothing half-written is left"
    assert not list(good.rglob("ledger*"))


def test_a_refusing_policy_is_exit_code_4_for_budget(good: Path) -> None:
    _edit(good / "sites" / "east.toml", "max_epsilon = 20.0", "max_epsilon = 2.0")
    result = _fedcorpus("simulate", "study.toml", "--out", "run", cwd=good)
    assert result.returncode == 4
    assert "asks for epsilon 8" in " ".join(result.stderr.split())


def test_a_refusing_policy_is_exit_code_3(good: Path) -> None:
    _edit(good / "sites" / "east.toml", "[policy]", '[policy]\nallowed_units = ["patient"]')
    assert _fedcorpus("simulate", "study.toml", "--out", "run", cwd=good).returncode == 3


def test_a_run_folder_that_holds_something_is_left_alone(good: Path) -> None:
    (good / "run").mkdir()
    (good / "run" / "precious").write_text("x")
    result = _fedcorpus("simulate", "study.toml", "--out", "run", cwd=good)
    assert result.returncode == 2
    assert (good / "run" / "precious").read_text() == "x"


def test_a_weak_environment_without_flower_is_refused(good: Path) -> None:
    result = _fedcorpus("up", "study.toml", "--out", "run", "--weak-env", "sites", cwd=good)
    assert result.returncode == 2
    assert "flower-supernode" in result.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--site-column", "hospital"], "--data"),
        (["--data", "x.csv"], "--site-column"),
        (["--data", "missing.csv", "--site-column", "a", "--code-column", "b"], "missing.csv"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_the_demo_refuses_options_that_do_not_fit(tmp_path: Path, options: list[str], expected: str) -> None:
    result = _fedcorpus("demo", "--out", "demo", *options, cwd=tmp_path)
    assert result.returncode == 2
    assert expected in result.stderr
    assert not (tmp_path / "demo").exists()


def test_plan_says_what_a_study_costs(good: Path) -> None:
    result = _fedcorpus("plan", "study.toml", "--json", cwd=good)
    assert result.returncode == 0
    planned = json.loads(result.stdout)
    releases = planned["releases"]
    assert planned["accounting"] == "joint"
    assert all(0.01 < planned["joint_saves"][tier] < 0.2 for tier in ("strong", "weak"))
    assert planned["joint_saves"]["profile"] > 0.3
    assert [r["tier"] for r in releases] == ["strong", "strong", "weak", "weak"]
    assert all(7.5 < r["joint_epsilon"] <= 8 for r in releases)
    assert planned["max_units"] == 1_000_000


def test_plan_says_how_much_a_weak_site_can_claim(good: Path) -> None:
    _edit(good / "study.toml", "[federation]", "[federation]\nmax_units = 2500")
    said = " ".join(_fedcorpus("plan", "study.toml", cwd=good).stdout.split())
    assert "A weak site counts for up to 2,500 units, whether it has them or not" in said


def test_plan_prints_what_joint_accounting_saves_over_the_papers_split(good: Path) -> None:
    said = {}
    for accounting in ("joint", "paper"):
        _edit(good / "study.toml", "[privacy]", f'[privacy]\naccounting = "{accounting}"')
        result = _fedcorpus("plan", "study.toml", cwd=good)
        said[accounting] = " ".join(result.stdout.split())
        assert re.search(
            r"needs \d\.\d% less training noise, \d\.\d% less vote noise and \d+% less profile noise than",
            said[accounting],
        )
        _edit(good / "study.toml", f'accounting = "{accounting}"\n', "")
    assert "(this study)" in said["joint"]
    assert "(not this study)" in said["paper"]


def test_plan_solves_epsilon_where_the_noise_is_given(good: Path) -> None:
    _edit(good / "study.toml", "epsilon = 8.0", "training_noise_multiplier = 2.0\nvote_noise_multiplier = 1.0")
    releases = json.loads(_fedcorpus("plan", "study.toml", "--json", cwd=good).stdout)["releases"]
    assert "multiplier 2.0000" in releases[0]["noise"]
    assert 1 < releases[0]["joint_epsilon"] < 8
    assert 3 < releases[2]["joint_epsilon"] < 5


def test_three_that_contradict_each_other_end_with_one_sentence(good: Path) -> None:
    _edit(good / "study.toml", "epsilon = 8.0", "epsilon = 1.0\ntraining_noise_multiplier = 0.5")
    result = _fedcorpus("plan", "study.toml", cwd=good)
    assert result.returncode == 2
    assert "noise_multiplier is 0.5, which costs epsilon" in result.stderr


def test_an_operator_sees_the_budget_exports_the_ledger_and_anyone_verifies(good: Path) -> None:
    sites = [good / "sites" / f"{name}.toml" for name in ("north", "south", "east")]
    run = open_run(str(good / "study.toml"), str(good / "run"))
    run_study(InProcessGrid(dict(enumerate(sites, start=1))), run)
    for site in sites:
        assert _fedcorpus("site", "export", site, "--out", f"{site.stem}.json", cwd=good).returncode == 0
    assert _fedcorpus("site", "export", sites[0], "--out", "north.json", cwd=good).returncode == 2, "never overwritten"
    budget = _fedcorpus("site", "budget", sites[2], cwd=good).stdout
    assert "of 20" in budget
    as_json = json.loads(_fedcorpus("site", "budget", sites[2], "--json", cwd=good).stdout)
    assert 7.9 < as_json["epsilon"]["spent"] <= 8
    verified = _fedcorpus("verify", "run", "north.json", "south.json", "east.json", cwd=good)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "The claim HOLDS." in verified.stdout
    missing = _fedcorpus("verify", "run", "north.json", "south.json", "--json", cwd=good)
    assert missing.returncode == 1
    assert json.loads(missing.stdout)["holds"] is False
    assert _fedcorpus("verify", "run", "nothing.json", cwd=good).returncode == 2


def test_a_person_approves_a_study_that_waits(good: Path) -> None:
    site = good / "sites" / "east.toml"
    assert _fedcorpus("site", "pending", site, cwd=good).returncode == 2, "looking makes no ledger"
    assert not list(good.rglob("ledger.sqlite"))
    _edit(site, "[policy]", '[policy]\nallowed_studies = "ask"')
    study = Study.load(good / "study.toml")
    request = CensusRequest(study, "run")
    assert Door(Site.load(site)).census(request).refusal == WireCode.AWAITING_APPROVAL
    listed = _fedcorpus("site", "pending", site, cwd=good).stdout
    assert study.sha256 in "".join(listed.split())
    assert _fedcorpus("site", "approve", site, "zzz", cwd=good).returncode == 2
    assert _fedcorpus("site", "approve", site, study.sha256[:8], "--by", "Dr Who", cwd=good).returncode == 0
    assert Door(Site.load(site)).census(request).refusal is None
    assert "No study waits" in _fedcorpus("site", "pending", site, cwd=good).stdout
    assert _fedcorpus("site", "decline", site, study.sha256[:8], cwd=good).returncode == 0
    assert Door(Site.load(site)).census(request).refusal == WireCode.AWAITING_APPROVAL


def test_site_check_tells_the_operator(good: Path) -> None:
    result = _fedcorpus("site", "check", "sites/east.toml", "--study", "study.toml", cwd=good)
    assert result.returncode == 0
    assert "40 documents of 40 units" in " ".join(result.stdout.split())


@pytest.mark.parametrize("file", ["study", "site"])
def test_every_option_says_what_it_is(tmp_path: Path, file: str) -> None:
    listed = json.loads(_fedcorpus("options", file, "--json", cwd=tmp_path).stdout)
    assert all(option["description"] for option in listed)
    names = {option["name"] for option in listed}
    assert names >= (
        {"privacy.epsilon", "codes.attributes.values"} if file == "study" else {"policy.max_epsilon", "tier"}
    )


def test_help_shows_every_command(tmp_path: Path) -> None:
    result = _fedcorpus("--help", cwd=tmp_path)
    assert all(command in result.stdout for command in ("demo", "simulate", "up", "plan", "site"))
