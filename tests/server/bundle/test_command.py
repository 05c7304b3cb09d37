"""The commands ``fedcorpus release`` and ``fedcorpus verify``: what is printed, and how they end."""

from __future__ import annotations

import json
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from server.bundle import files
from server.bundle.signing import public_pem
from server.cli import main
from tests.server.bundle.finished import Finished, changed_run

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fedcorpus(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """The command line in this process: exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["fedcorpus", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def test_a_corpus_is_released_with_a_new_key_and_verified_by_anybody(
    fedcorpus: Command, finished: Finished, tmp_path: Path
) -> None:
    out, key = tmp_path / "bundle", tmp_path / "key.pem"
    code, said, _ = fedcorpus(
        "release", finished.run, "--out", out, "--new-key", key, "--title", "A [bold]title[/]", "--license", "CC0-1.0",
    )  # fmt: skip
    assert code == 0
    assert f"20 texts written to {out}" in said
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    fingerprint = json.loads((out / files.FACTS).read_text())["signing_key"]
    assert fingerprint in said
    code, said, _ = fedcorpus("verify", out, finished.ledgers, "--key", out / files.PUBLIC_KEY)
    assert code == 0
    assert "A [bold]title[/]: 20 texts" in said
    assert "Signed by the key that was given." in said
    assert fingerprint in said
    assert "The claim HOLDS, by the study and by the sites' ledgers." in said
    code, said, _ = fedcorpus("verify", out)
    assert code == 0
    assert "Whether the sites kept to it, only their ledgers show." in said
    assert "not who signed" in said

    # The key is used again.
    code, said, _ = fedcorpus("release", finished.run, "--out", tmp_path / "second", "--key", key, "--json")
    assert code == 0
    assert json.loads(said)["signing_key"] == fingerprint
    assert json.loads(said)["title"] == "small"


def test_a_changed_bundle_is_refused_and_the_problem_named(fedcorpus: Command, bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    (copy / "a\x1b[2Jb").touch()
    code, said, _ = fedcorpus("verify", copy)
    assert code == 1
    assert "a [2Jb was added" in said
    assert "The claim is NOT confirmed." in said
    code, said, _ = fedcorpus("verify", copy, "--json")
    assert code == 1
    assert json.loads(said)["problems"] == ["a\x1b[2Jb was added"]
    other = tmp_path / "other.pub"
    other.write_bytes(public_pem(Ed25519PrivateKey.generate().public_key()))
    code, said, _ = fedcorpus("verify", bundle, "--key", other)
    assert code == 1
    assert "The signature is WRONG" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give one of --key FILE, --new-key FILE and --unsigned"),
        (["--unsigned", "--new-key", "k"], "give one of --key FILE"),
        (["--key", "no-such.pem"], "no-such.pem: can't be read"),
        (["--new-key", "taken.pem"], "taken.pem: exists already"),
        (["--key", "taken.pem"], "taken.pem: mode 644 lets others at this signing key"),
        (["--unsigned", "--license", "all mine"], "license"),
        (["--unsigned", "--language", "English"], "language"),
        (["--unsigned", "--title", "  "], "title"),
        (["--unsigned", "--title", "a\nb"], "title"),
        (["--unsigned", "--title", "a\u202eb"], "title"),
        (["--unsigned", "--publisher", "x" * 201], "publisher"),
    ],
)
def test_options_without_a_meaning_are_named_before_anything_is_written(
    fedcorpus: Command,
    finished: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken.pem").write_text("")
    Path("taken.pem").chmod(0o644)
    code, _, err = fedcorpus("release", finished.run, "--out", "bundle", *options)
    assert code == 2
    assert said in err
    assert [path.name for path in tmp_path.iterdir()] == ["taken.pem"]


def test_a_new_key_that_signed_nothing_is_no_obstacle_to_the_next_attempt(
    fedcorpus: Command, finished: Finished, tmp_path: Path
) -> None:
    run = changed_run(finished, tmp_path / "run", [("a", 0)], missing={1: 2})
    release = ("release", run, "--out", tmp_path / "bundle", "--new-key", tmp_path / "key.pem")
    code, _, err = fedcorpus(*release)
    assert code == 2
    assert "2 texts are missing" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    code, said, _ = fedcorpus(*release, "--allow-holes")
    assert code == 0
    assert "2 texts are missing; the card says which" in said


def test_a_folder_that_is_neither_run_nor_bundle_is_named(
    fedcorpus: Command, finished: Finished, bundle: Path, tmp_path: Path
) -> None:
    for command in (
        ("release", tmp_path, "--out", tmp_path / "b", "--unsigned"),
        ("verify", tmp_path, finished.ledgers),
    ):
        code, _, err = fedcorpus(*command)
        assert code == 2
        assert "no run that has finished" in err
    code, _, err = fedcorpus("verify", bundle, "--key", bundle / files.CARD)
    assert code == 2
    assert "README.md: not a public key" in err
    code, _, err = fedcorpus("verify", finished.run, finished.ledgers, "--key", bundle / files.PUBLIC_KEY)
    assert code == 2
    assert "only a bundle is signed" in err
    code, said, _ = fedcorpus("verify", finished.run, finished.ledgers)
    assert code == 0
    assert "The claim HOLDS." in said
