"""The real thing, as hospitals run it: processes, TLS, node keys, weak sites without torch; and Flower's simulation.

The documents are real comments of patients of three real hospitals, split to six sites (in a stranger's clone: the
packaged reviews). Only the language model is tiny, so that a run takes a minute.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from common.models.manifest import manifest_of_base
from common.site.config import Site
from common.site.ledger import Ledger
from common.study import Study
from server.aggregate import quotas
from server.checkpoint import read_checkpoint
from server.corpus import read_ballots, read_corpus, read_pool, read_profiles
from server.demo import prepare_demo
from server.sizes import units_of_voters
from server.summary import read_summary
from server.workspace import Workspace
from tests.hospitals import NHS_FEEDBACK
from tests.test_install import WEAK_VENV

LONG = 30
"""Rounds of a run that is interrupted."""

FEDCORPUS = str(Path(sys.executable).parent / "fedcorpus")


def _prepare(folder: Path, tiny_model: Path) -> tuple[Path, Path]:
    """The demo's own files, with the tiny model and fewer steps; (study file, sites folder)."""
    if NHS_FEEDBACK.exists():
        demo = prepare_demo(folder / "demo", NHS_FEEDBACK, "hospital", ("label", "sentiment"), "text")
    else:
        demo = prepare_demo(folder / "demo", None, None, (), "text")
    text = demo.study_file.read_text()
    for pattern, value in {
        r'base = ".*"': f"base = {json.dumps(str(tiny_model))}",
        r'sha256 = ".*"': f'sha256 = "{manifest_of_base(str(tiny_model)).digest}"',
        r'dtype = ".*"': 'dtype = "float32"',
        r"rounds = \d+": "rounds = 2",
        r"steps = \d+": "steps = 2",
        r"max_new_tokens = \d+": "max_new_tokens = 8",
        r"size = 300": "size = 120",
    }.items():
        text, replaced = re.subn(pattern, value, text, count=1)
        assert replaced, pattern
    demo.study_file.write_text(text)
    return demo.study_file, demo.sites_folder


def _fedcorpus(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [FEDCORPUS, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "XDG_STATE_HOME": str(cwd / "coordinator")},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    logs = "".join(p.read_text(errors="replace")[-3000:] for p in cwd.rglob("federation/*.log"))
    assert result.returncode == 0, result.stdout + result.stderr + logs
    return result


def _check_corpus(study_file: Path, sites: Path, run: Path) -> None:
    study, workspace = Study.load(study_file), Workspace(run)
    texts = read_corpus(workspace, study.codes)
    made = np.bincount([text.code for text in texts], minlength=len(study.codes))
    profiles = read_profiles(workspace.profiles)
    assert set(profiles) == {Site.load(file).name for file in sites.glob("*.toml")}
    pool, ballots = read_pool(workspace.pool), read_ballots(workspace.ballots)
    voters = units_of_voters(study, pool.codes, [profiles[name] for name in ballots], list(ballots.values()))
    strong = [profile for name, profile in profiles.items() if name not in ballots]
    assert made.tolist() == quotas(np.sum([*strong, voters], axis=0), study.corpus.size).tolist()
    candidates = set(zip(pool.texts, pool.codes.tolist(), strict=True))
    assert all(((t.text, t.code) in candidates) == (t.origin == "candidate") for t in texts if t.origin != "repeat")
    summary = read_summary(workspace)
    assert {site.outcome for site in summary.sites} == {"answered"}
    assert sorted(site.answers for site in summary.sites if site.tier == "weak") == [1, 1, 1, 1]
    for file in sites.glob("*.toml"):
        epsilon, _ = Ledger(Site.load(file).ledger_path).spent()
        assert 0 < epsilon <= study.privacy.epsilon


def _check_nothing_exact_is_left(sites: Path, folders: Sequence[Path]) -> None:
    """No file of a run, of Flower or of Ray, holds a piece of a real document."""
    pieces = set()
    for file in sites.glob("*.toml"):
        site = Site.load(file)
        texts = pq.read_table(site.documents.path).column("text").to_pylist()
        # From the middle: a text's first words may be common ones.
        pieces |= {text[20:60].encode() for text in texts if len(text) > 80}
    assert len(pieces) > 100
    pattern = re.compile(b"|".join(map(re.escape, pieces)))
    searched = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    assert len(searched) > 10
    assert not [file for file in searched if pattern.search(file.read_bytes())]


def _processes_of(run: Path) -> list[str]:
    """Command lines of processes that still work for this run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(run).encode() in environment and int(entry.name) != os.getpid():
            found.append(command.replace(b"\0", b" ").decode())
    return found


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_real_federation_gives_a_corpus_and_its_weak_sites_have_no_torch(tmp_path: Path, tiny_model: Path) -> None:
    study, sites = _prepare(tmp_path, tiny_model)
    result = _fedcorpus("up", study, "--sites", sites, "--out", "run", "--weak-env", WEAK_VENV, "--json", cwd=tmp_path)
    run = tmp_path / "run"
    assert json.loads(result.stdout)["corpus_size"] == Study.load(study).corpus.size
    _check_corpus(study, sites, run)
    weak = [Site.load(file) for file in sites.glob("*.toml") if Site.load(file).tier == "weak"]
    assert len(weak) == 4
    for site in weak:
        log = (run / "federation" / f"{site.name}.log").read_text()
        assert "torch" not in log
        with Ledger.of(site) as ledger:
            releases = [e["content"] for e in ledger.export(site.name)["events"] if e["kind"] == "release"]
        assert [(r["key"], r["parts"]) for r in releases] == [("profile-and-vote", ["votes", "profile"])]
    keys = list((run / "federation" / "certificates").glob("*.key"))
    assert len(keys) == 7
    assert all(key.stat().st_mode & 0o077 == 0 for key in keys)
    assert not _processes_of(run)
    _check_nothing_exact_is_left(sites, [run, *(Site.load(file).state for file in sites.glob("*.toml"))])
    for file in sites.glob("*.toml"):
        _fedcorpus("site", "export", file, "--out", tmp_path / f"{file.stem}.ledger.json", cwd=tmp_path)
    exported = sorted(tmp_path.glob("*.ledger.json"))
    assert "The claim HOLDS" in _fedcorpus("verify", "run", *exported, cwd=tmp_path).stdout
    assert json.loads((tmp_path / "coordinator" / "fedcorpus" / "ledger-heads.json").read_text())


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_flowers_simulation_gives_a_corpus(tmp_path: Path, tiny_model: Path) -> None:
    study, sites = _prepare(tmp_path, tiny_model)
    started = time.time()
    result = _fedcorpus("simulate", study, "--sites", sites, "--out", "run", cwd=tmp_path)
    ray = [session for session in Path("/tmp/ray").glob("session_*") if session.stat().st_mtime >= started]
    states = [Site.load(file).state for file in sites.glob("*.toml")]
    _check_nothing_exact_is_left(sites, [tmp_path / "run", *states, *ray])
    _check_corpus(study, sites, tmp_path / "run")
    assert "Privacy: every site's releases together" in " ".join(result.stdout.split())
    assert "census of the sites: done" in result.stderr, "progress goes to standard error"
    assert not _processes_of(tmp_path / "run")


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_terminated_command_takes_its_processes_with_it_and_its_run_can_go_on(
    tmp_path: Path, tiny_model: Path
) -> None:
    study, sites = _prepare(tmp_path, tiny_model)
    # Long enough to be caught in the middle.
    study.write_text(study.read_text().replace("rounds = 2", f"rounds = {LONG}"))
    with subprocess.Popen(
        [FEDCORPUS, "simulate", str(study), "--sites", str(sites), "--out", str(tmp_path / "run")],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "coordinator")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stderr is not None
        for line in command.stderr:
            if "round 1: signal/noise" in line:
                break
        assert _processes_of(tmp_path / "run")
        command.terminate()
        assert command.wait(60) == 1
    assert not _processes_of(tmp_path / "run")
    left = read_checkpoint(Workspace(tmp_path / "run"), Study.load(study)).round
    assert 1 <= left < LONG
    resumed = _fedcorpus("resume", "run", cwd=tmp_path)
    assert "census of the sites: done" in resumed.stderr
    _check_corpus(study, sites, tmp_path / "run")
    for file in sites.glob("*.toml"):
        with Ledger.of(Site.load(file)) as ledger:
            kinds = [event["kind"] for event in ledger.export("")["events"]]
        assert kinds.count("reservation") == 1
        assert kinds.count("release") == (LONG if Site.load(file).tier == "strong" else 1)
    with pytest.raises(AssertionError, match="this run is finished"):
        _fedcorpus("resume", "run", cwd=tmp_path)


def _in(words: Sequence[str], text: str) -> bool:
    return all(word in text for word in words)


def test_the_app_bundle_holds_code_only(tmp_path: Path) -> None:
    """Data planted beside the code, in every format Flower would take by itself, stays out of what sites receive."""
    import shutil
    import zipfile

    from deploy.app import PACKAGES, stage_app

    source = tmp_path / "source"
    root = Path(__file__).parents[2]
    for package in PACKAGES:
        shutil.copytree(root / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
        for planted in ("notes.jsonl", "notes.csv", "notes.json", "site.toml", "README.md", "notes.yaml", "x.parquet"):
            (source / package / planted).write_text("Mrs Zwiebelfisch")
    shutil.copy(root / "pyproject.toml", source)
    code = f"import sys; sys.path[:0] = [{str(source)!r}]; from pathlib import Path; from deploy.app import stage_app; "
    shutil.copytree(root / "deploy", source / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-I", "-c", code + f"stage_app(Path({str(tmp_path)!r}))"], check=True, capture_output=True
    )
    environment = {**os.environ, "FLWR_HOME": str(tmp_path / "home"), "FLWR_DISABLE_UPDATE_CHECK": "1"}
    environment["FLWR_TELEMETRY_ENABLED"] = "0"
    flwr = str(Path(sys.executable).parent / "flwr")
    subprocess.run(
        [flwr, "build", "--app", str(tmp_path / "fedcorpus")],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
    )
    (bundle,) = tmp_path.glob("*.fab")
    with zipfile.ZipFile(bundle) as files:
        names = files.namelist()
        everything = b"".join(files.read(name) for name in names)
    assert stage_app.__module__ == "deploy.app"
    assert _in(["server/server_app.py", "common/site/door.py"], " ".join(names))
    assert all(name.endswith(".py") or name in ("pyproject.toml",) or name.startswith(".info") for name in names), names
    assert b"Zwiebelfisch" not in everything
