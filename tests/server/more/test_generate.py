"""More text from a finished run: as many as asked, none twice, whatever happens to the process or the disk."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import server.more.generate as more
from common.errors import CheckpointError, DataError, FedcorpusError, FederationError, GenerationError, UserError
from server.checkpoint import held, read_checkpoint, write_checkpoint
from server.cli import app
from server.corpus import CorpusText
from server.generation import TextSampler
from server.more.folder import Folder
from server.more.generate import Report, generate_more
from server.more.state import ROUNDS, State
from server.summary import read_summary
from server.workspace import Workspace
from tests.model_run import model_run

FEDCORPUS = str(Path(sys.executable).parent / "fedcorpus")
TEXTS, PER_SHARD = 90, 35
POOL = {"batch_size": 64, "dtype": "float32", "max_new_tokens": 6}


class Killed(BaseException):
    """What no handler in the program catches."""


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Workspace:
    return model_run(tmp_path / "run", tiny_model, pool=POOL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A generation that nothing happened to."""
    space = model_run(tmp_path_factory.mktemp("whole") / "run", tiny_model, pool=POOL)
    _more(space)
    return space.more(TEXTS)


def _more(run: Workspace, texts: int = TEXTS, out: Path | None = None) -> Report:
    return generate_more(run.root, texts, out, texts_per_shard=PER_SHARD)


def _rows(folder: Path) -> list[dict[str, str]]:
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def _texts(folder: Path) -> set[str]:
    return {row["text"].casefold() for row in _rows(folder)}


def test_exactly_as_many_distinct_texts_as_asked_in_the_runs_proportions(run: Workspace) -> None:
    steps: list[tuple[str, int, int]] = []
    report = generate_more(run.root, TEXTS, None, lambda *step: steps.append(step), texts_per_shard=PER_SHARD)
    rows = _rows(run.more(TEXTS))
    # 60, 30, 10 and 0 of a hundred.
    counts = Counter((row["topic"], row["tone"]) for row in rows)
    assert counts == {("staff", "1"): 54, ("staff", "2"): 27, ("parking", "1"): 9}
    assert len({row["text"].casefold() for row in rows}) == len({row["id"] for row in rows}) == TEXTS
    assert (report.texts, report.wanted, report.files, report.missing) == (TEXTS, TEXTS, 3, {})
    assert (report.epsilon, report.delta) == (7.9, 1e-4)
    assert "No privacy was spent" in report.privacy
    assert steps[-1] == ("texts", TEXTS, TEXTS)
    for file in run.more(TEXTS).glob("*.parquet"):
        part = Counter(row["topic"] for row in pq.read_table(file).to_pylist())
        assert part["staff"] > part["parking"] > 0, "every file is a small corpus"
        assert pq.ParquetFile(file).metadata.row_group(0).column(1).compression == "ZSTD"


def test_columns_are_those_of_the_runs_corpus(run: Workspace) -> None:
    _more(run)
    file = run.more(TEXTS) / "part-00000.parquet"
    assert pq.read_schema(file).equals(pq.read_schema(run.corpus_parquet))


def test_the_same_call_again_says_the_same_and_makes_nothing(run: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _more(run)
    monkeypatch.setattr(more, "Generator", None)
    assert _more(run) == report


def test_texts_of_the_released_corpus_are_not_made_again(tmp_path: Path, tiny_model: Path, whole: Path) -> None:
    released = [CorpusText(row["text"].upper(), 0, "candidate") for row in _rows(whole)[:20]]
    later = model_run(tmp_path / "later", tiny_model, released=released, pool=POOL)
    assert _more(later).dropped["duplicate"] >= 20, "it would have made them"
    assert not _texts(later.more(TEXTS)) & {text.text.casefold() for text in released}


def test_a_later_generation_has_other_texts(run: Workspace, tmp_path: Path) -> None:
    _more(run)
    _more(run, out=tmp_path / "second")
    _more(run, texts=30)
    folders = [run.more(TEXTS), tmp_path / "second", run.more(30)]
    assert len(set().union(*map(_texts, folders))) == 2 * TEXTS + 30
    ids = {row["id"] for folder in folders for row in _rows(folder)}
    assert len(ids) == 2 * TEXTS + 30


def test_texts_of_an_earlier_generation_are_not_made_again(
    run: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with the same chance: as if both were the first."""
    _more(run)
    real = TextSampler.sample

    def alike(self: TextSampler, *arguments: Any, series: str, **options: Any) -> Any:
        return real(self, *arguments, series=series.replace("more 2", "more 1"), **options)

    monkeypatch.setattr(TextSampler, "sample", alike)
    assert _more(run, out=tmp_path / "second").dropped["duplicate"] > 10
    assert not _texts(run.more(TEXTS)) & _texts(tmp_path / "second")


def test_a_generation_whose_folder_was_moved_goes_on_where_it_is(run: Workspace, tmp_path: Path, whole: Path) -> None:
    _stop(run, "write_state", 2)
    run.more(TEXTS).rename(tmp_path / "moved")
    _more(run, out=tmp_path / "moved")
    assert _rows(tmp_path / "moved") == _rows(whole)


# Killed


def _stop(run: Workspace, name: str, call: int, *, before: bool = False, owner: Any = more) -> None:
    """Die at the ``call``-th call of a function, before it does its work or right after."""
    real, calls = getattr(owner, name), Counter[str]()

    def dying(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        if before and calls[name] == call:
            raise Killed
        result = real(*arguments, **options)
        if calls[name] == call:
            raise Killed
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            _more(run)


def _known(folder: Folder) -> int:
    """Texts on disk, kept or not: of the shards that are done, and of the one that was being made."""
    if not folder.state.exists():
        return 0
    state = State.model_validate_json(folder.state.read_bytes())
    lines = folder.log.read_bytes().splitlines() if folder.log.exists() else [b"{}"]
    current = json.loads(lines[0]).get("generation", {}).get("place") == state.place
    return state.texts + sum(state.dropped.values()) + (len(lines) - 1 if current else 0)


POINTS: dict[str, tuple[str, int, bool, Any]] = {
    "before anything is made": ("write_state", 1, False, more),
    "in the first shard": ("add", 20, False, more.CandidateLog),
    "in the second shard": ("add", PER_SHARD + 20, True, more.CandidateLog),
    "before a file is written": ("write_file", 2, True, more),
    "after a file was written": ("write_file", 2, False, more),
    "after the state was written": ("write_state", 3, False, more),
    "after the last text": ("write_file", 3, False, more),
}


@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_it_goes_on_to_the_same_texts(
    run: Workspace, whole: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, call, before, owner = POINTS[point]
    _stop(run, name, call, before=before, owner=owner)
    finished = {file: file.stat().st_mtime_ns for file in run.more(TEXTS).glob("*.parquet")}
    known = _known(Folder(run.more(TEXTS)))
    asked: list[object] = []
    real = TextSampler._request
    monkeypatch.setattr(TextSampler, "_request", lambda *order: asked.append(order) or real(*order))
    report = _more(run)
    assert _rows(run.more(TEXTS)) == _rows(whole)
    assert json.loads((run.more(TEXTS) / "generation.json").read_text()) == json.loads(
        (whole / "generation.json").read_text()
    )
    assert report.texts == TEXTS
    assert sum(file.stat().st_mtime_ns != then for file, then in finished.items()) <= 1, "one file is made again"
    assert len(asked) == TEXTS + sum(report.dropped.values()) - known, "what is on disk isn't generated again"
    assert not (run.more(TEXTS) / ".candidates.jsonl").exists()


@pytest.mark.slow
def test_killed_without_warning_it_goes_on(run: Workspace) -> None:
    """The real command, and SIGKILL while it writes a file's texts."""
    command, folder = ["generate", str(run.root), "-n", "900", "--json"], Folder(run.more(900))
    with subprocess.Popen([FEDCORPUS, *command], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as running:
        while not folder.log.exists() or folder.log.read_bytes().count(b"\n") < 300:
            assert running.poll() is None
            time.sleep(0.002)
        running.send_signal(signal.SIGKILL)
    assert not folder.file(0).exists()
    assert _known(folder) >= 299
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["texts"] == len(_texts(folder.root)) == 900
    assert "texts made: 900 of 900" in done.stderr


# Bad input


def _damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _other_study(run: Workspace, _: Path) -> None:
    run.study.write_bytes(run.study.read_bytes().replace(b'"small"', b'"other"'))


def _no_adapter(run: Workspace, _: Path) -> None:
    run.checkpoint.unlink()


BAD: dict[str, tuple[Callable[[Workspace, Path], object], type[FedcorpusError], str]] = {
    "a run that isn't finished": (lambda run, _: run.summary_json.unlink(), DataError, "no run that has finished"),
    "no run": (lambda run, _: shutil.rmtree(run.root), DataError, "no run that has finished"),
    "another study in the run's folder": (_other_study, DataError, "isn't the study of summary.json"),
    "no adapter": (_no_adapter, CheckpointError, "adapter"),
    "a damaged adapter": (lambda run, _: _damage(run.checkpoint), CheckpointError, "can't be read"),
    "a damaged pool": (lambda run, _: run.pool.write_text("{"), DataError, "not JSON"),
    "damaged ballots": (lambda run, _: _damage(run.ballots), DataError, "ballots"),
    "a damaged list of generations": (lambda run, _: run.generations.write_text("{}"), CheckpointError, "list"),
    "a folder with other things": (
        lambda _, out: (out.mkdir(), (out / "thesis.txt").write_text("mine")), CheckpointError, "isn't empty"
    ),
    "a file in place of the folder": (lambda _, out: out.write_text("mine"), CheckpointError, "isn't empty"),
    "a damaged state": (
        lambda _, out: (out.mkdir(), (out / "generation.json").write_text("{")), CheckpointError, "generation.json"
    ),
    "a folder that nobody may write": (lambda _, out: out.symlink_to("/proc/nothing"), GenerationError, "0 of 90"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error_and_leaves_what_is_there(run: Workspace, tmp_path: Path, case: str) -> None:
    spoil, error, words = BAD[case]
    out = tmp_path / "out"
    spoil(run, out)
    before = out.read_bytes() if out.is_file() else None
    with pytest.raises(error, match=words) as caught:
        _more(run, out=out)
    assert "\n" not in str(caught.value)
    assert before is None or out.read_bytes() == before
    assert not list(tmp_path.rglob("*.parquet")) or not out.exists() or not list(out.rglob("*.parquet"))


@pytest.mark.parametrize("texts", [0, -3])
def test_fewer_than_one_text_is_an_error(run: Workspace, texts: int) -> None:
    with pytest.raises(UserError, match=f"{texts} texts are asked for"):
        _more(run, texts=texts)


def test_the_folder_of_another_generation_is_refused_and_stays_as_it_is(
    run: Workspace, tmp_path: Path, tiny_model: Path
) -> None:
    out = tmp_path / "out"
    _more(run, out=out)
    rows = _rows(out)
    other = model_run(tmp_path / "other", tiny_model, run_id="f" * 16, pool=POOL)
    longer = model_run(tmp_path / "longer", tiny_model, pool={**POOL, "max_new_tokens": 9})
    for space, texts, what in (
        (run, TEXTS + 1, "number of texts"),
        (other, TEXTS, "the run"),
        (longer, TEXTS, "the study"),
    ):
        with pytest.raises(CheckpointError, match=f"{what} is .* another --out"):
            _more(space, texts, out)
    assert _rows(out) == rows


def test_a_missing_or_damaged_file_is_noticed_before_more_is_made(run: Workspace) -> None:
    for spoil in (_damage, Path.unlink):
        _stop(run, "write_state", 3)
        spoil(run.more(TEXTS) / "part-00000.parquet")
        with pytest.raises(DataError, match=r"part-00000\.parquet: can't be read"):
            _more(run)
        shutil.rmtree(run.more(TEXTS))


def test_two_processes_do_not_write_into_one_folder(run: Workspace) -> None:
    run.more(TEXTS).mkdir()
    with held(Workspace(run.more(TEXTS))), pytest.raises(FederationError, match="another process"):
        _more(run)
    assert _more(run).texts == TEXTS


@contextmanager
def _full_disk(after: int) -> Iterator[None]:
    """Files can't grow beyond so many bytes: what the kernel then says differs from a full disk in one word."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [100, 1500])
def test_a_full_disk_is_said_and_a_rerun_goes_on(run: Workspace, whole: Path, limit: int) -> None:
    with _full_disk(limit), pytest.raises(GenerationError, match=r"can't be written .*the same command goes on"):
        _more(run)
    _more(run)
    assert _rows(run.more(TEXTS)) == _rows(whole)


def test_a_disk_that_is_full_when_a_file_is_written_leaves_no_half_file(
    run: Workspace, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: Any, real: Callable[..., None] = more.write_file) -> None:
        with _full_disk(500):
            real(*arguments)

    monkeypatch.setattr(more, "write_file", write)
    with pytest.raises(GenerationError, match=r"can't be written .*0 of 90 texts.*the same command goes on"):
        _more(run)
    assert not list(run.more(TEXTS).glob("*.parquet"))
    monkeypatch.undo()
    _more(run)
    assert _rows(run.more(TEXTS)) == _rows(whole)


def test_a_model_that_only_ends_is_said_and_no_file_is_left(tmp_path: Path, ending_model: Path) -> None:
    run = model_run(tmp_path / "run", ending_model, pool={**POOL, "top_p": 1e-6})
    for _ in range(2):
        with pytest.raises(GenerationError, match=r"none of 90 texts was usable; dropped: \d+ empty"):
            _more(run)
    assert not list(run.more(TEXTS).glob("*.parquet"))


def test_a_code_that_has_no_more_texts_is_a_hole_that_is_said(tmp_path: Path, tiny_model: Path) -> None:
    """A model that says one thing of each code: the other texts are duplicates of it, and the tries are bounded."""
    run = model_run(tmp_path / "run", tiny_model, pool={**POOL, "top_p": 1e-6, "max_repetition": 1})
    report = _more(run)
    assert 1 <= report.texts == len(_texts(run.more(TEXTS))) <= 3
    assert sum(report.missing.values()) + report.texts == TEXTS
    assert set(report.missing) == {"topic=staff, tone=1", "topic=staff, tone=2", "topic=parking, tone=1"}
    assert report.missing["topic=staff, tone=1"] in (53, 54)
    assert 60 < sum(report.dropped.values()) < TEXTS * 4 * ROUNDS
    done = CliRunner().invoke(app, ["generate", str(run.root), "-n", str(TEXTS), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["missing"] == report.missing
    assert f"{TEXTS - report.texts} texts are missing" in done.stderr


def test_a_run_of_an_earlier_version_of_the_program_goes_on(run: Workspace) -> None:
    """Its study doesn't know the options of today, and has the hash of what it was."""
    study = json.loads(run.study.read_bytes())
    for option in ("dtype", "max_repetition", "near_duplicate", "over_long"):
        del study["pool"][option]
    written = json.dumps(study, sort_keys=True, separators=(",", ":")).encode()
    sha256 = hashlib.sha256(written).hexdigest()
    checkpoint = read_checkpoint(run, SimpleNamespace(sha256=read_summary(run).study_sha256))
    run.study.write_bytes(written)
    write_checkpoint(run, SimpleNamespace(sha256=sha256), checkpoint)
    run.summary_json.write_text(read_summary(run).model_copy(update={"study_sha256": sha256}).model_dump_json())
    assert _more(run).texts == TEXTS


def test_the_command_refuses_a_number_that_is_none(run: Workspace) -> None:
    for number in ("0", "many"):
        done = CliRunner().invoke(app, ["generate", str(run.root), "-n", number])
        assert done.exit_code == 2
        assert number in done.stderr
    assert not list(run.root.glob("more*"))


def test_a_person_is_told_where_the_texts_are_and_what_they_cost(run: Workspace) -> None:
    done = CliRunner().invoke(app, ["generate", str(run.root), "-n", "20"])
    assert done.exit_code == 0
    assert f"20 of 20 texts in 1 Parquet files in {run.more(20)}" in done.stdout
    assert "No privacy was spent" in done.stdout
    assert "7.900" in done.stdout
