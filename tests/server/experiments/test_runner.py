"""An experiment from its file to its tables: real sites, doors and noise, with a tiny model and made-up comments."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import server.experiments.runner as module
import server.experiments.tuning as tuning
from common.errors import DataError, UserError
from common.study import Study
from server.cli import app
from server.experiments.cache import Cache, Step
from server.experiments.data import RealData
from server.experiments.estimate import Estimates
from server.experiments.federation import SiteDocuments
from server.experiments.plan import Experiment
from server.experiments.runner import Runner, read_rows, with_earlier
from server.experiments.situation import JUDGEMENT, TUNED, Situation
from server.experiments.tables import page
from server.experiments.voting import Votes
from tests.experiment_data import TAGGED, TOPICS, write_data

QUICK = Path(__file__).parents[2] / "benchmarks" / "paper" / "quick.toml"
QUICK_DATA = Experiment.load(QUICK).data.model_dump(mode="json")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("public"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Shared by the tests of this file, as it is by experiments."""
    return Cache(tmp_path_factory.mktemp("cache"))


def _experiment(base: Path, labels: Sequence[str] = (), **changes: Any) -> Experiment:
    """The quick one with a model that is there, one seed, and some of its cells."""
    quick = Experiment.load(QUICK).model_dump(mode="json")
    grid = [row for row in quick["grid"] if row["label"] in labels or not labels]
    tables = quick["tables"] if not labels else []
    models = {"tiny": {"base": str(base)}}
    return Experiment.model_validate(
        {**quick, "models": models, "seeds": [0], "grid": grid, "tables": tables, **changes}
    )


def _run(experiment: Experiment, data: Path, out: Path, cache: Cache) -> tuple[module.Report, list[str]]:
    said: list[str] = []
    report = Runner(experiment, data, out, cache, say=said.append).run()
    return report, said


@pytest.fixture(scope="module")
def whole(tiny_model: Path, data: Path, cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Any:
    experiment, out = _experiment(tiny_model), tmp_path_factory.mktemp("out")
    report, said = _run(experiment, data, out, cache)
    return experiment, report, out, said


def test_all_cells_are_there_with_all_numbers(whole: Any) -> None:
    experiment, report, out, _ = whole
    assert not report.failed
    assert not report.left
    assert sorted(row.cell for row in report.rows) == sorted(cell.name for cell in experiment.cells)
    for row in report.rows:
        assert {"accuracy, TF-IDF", "macro-F1, features", "Fréchet distance", "codes off"} <= set(row.numbers)
        assert all(np.isfinite(value) for value in row.numbers.values())
    assert [row.cell for row in read_rows(out / "results.jsonl")] == [row.cell for row in report.rows]


def test_the_page_has_every_cell_and_its_gap(whole: Any) -> None:
    experiment, report, _, _ = whole
    text = page(experiment, report.rows, report, {"at the sites": 400})
    for cell in experiment.cells:
        assert text.count(cell.name) >= 2, cell.name
    assert "share of the gap won back" in text
    assert "selection simplex" in text


def test_real_documents_are_a_ceiling(whole: Any) -> None:
    by_cell = {row.cell: row.numbers["accuracy, TF-IDF"] for row in whole[1].rows}
    assert by_cell["real documents"] > 0.9
    assert max(value for cell, value in by_cell.items() if cell != "real documents") < by_cell["real documents"]


def test_private_cells_state_what_their_sites_solved_and_plain_ones_nothing(whole: Any) -> None:
    notes = {row.cell: row.notes for row in whole[1].rows}
    refined = notes["refined (selection=simplex)"]
    assert refined["training noise multiplier"] == 1.0
    assert refined["training epsilon"] > 0
    assert refined["vote epsilon"] > 0
    assert "training epsilon" not in notes["without noise"]
    assert "vote epsilon" not in notes["strong only"]
    # Two votes of more noise each cost what one does.
    evolved, once = notes["Private Evolution"], notes["votes on zero-shot"]
    assert 0.9 * once["vote epsilon"] < evolved["vote epsilon"] <= once["vote epsilon"]
    assert evolved["vote noise"] > once["vote noise"]


def test_cells_share_what_they_have_in_common(whole: Any) -> None:
    results = {row.cell: row.results for row in whole[1].rows}
    simplex, uniform, alone = (
        results[c] for c in ("refined (selection=simplex)", "refined (selection=uniform)", "strong only")
    )
    assert simplex[TUNED] == uniform[TUNED] == alone[TUNED]
    assert simplex["pool-1"] == uniform["pool-1"] == alone["pool-1"]
    assert simplex["votes-1"] == uniform["votes-1"]
    assert simplex["corpus"] != uniform["corpus"]
    assert results["poisoned (poisoning=stuffed)"]["votes-1"] != simplex["votes-1"]
    assert results["all sites train"][TUNED] != simplex[TUNED]


def test_unseen_classes_are_judged_where_there_are_any(whole: Any) -> None:
    numbers = {row.cell: row.numbers for row in whole[1].rows}
    unseen = "recall of unseen classes, TF-IDF"
    assert unseen in numbers["refined (selection=simplex)"]
    assert unseen not in numbers["all sites train"]


def test_a_second_run_makes_nothing_and_writes_no_line_twice(whole: Any, data: Path, cache: Cache) -> None:
    experiment, report, out, _ = whole
    again, said = _run(experiment, data, out, cache)
    assert said == []
    assert sorted(r.results[JUDGEMENT] for r in again.rows) == sorted(r.results[JUDGEMENT] for r in report.rows)
    assert len(read_rows(out / "results.jsonl")) == len(report.rows)


def test_another_selection_rule_makes_a_corpus_and_nothing_before_it(
    whole: Any, tiny_model: Path, data: Path, cache: Cache, tmp_path: Path
) -> None:
    grid = [{"label": "refined", "study.corpus.selection": ["paper"]}]
    _, said = _run(_experiment(tiny_model, grid=grid, tables=[]), data, tmp_path, cache)
    assert [line.rpartition(": ")[2] for line in said] == ["corpus", "judgement"]


def test_votes_are_those_of_real_sites_behind_their_doors(whole: Any, cache: Cache) -> None:
    ledgers = sorted(cache.homes.glob("*/state/ledger.sqlite"))
    assert len(ledgers) >= 4
    with sqlite3.connect(ledgers[0]) as ledger:
        tables = [name for (name,) in ledger.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        assert any(ledger.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables)


def test_what_was_killed_goes_on_and_no_site_is_charged_twice(
    tiny_model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, cache = _experiment(tiny_model, ["strong only"]), Cache(tmp_path / "cache")
    runs: list[str] = []
    original, read = tuning.write_checkpoint, tuning.read_identity
    monkeypatch.setattr(tuning, "read_identity", lambda space: runs.append(read(space)) or runs[-1])

    def killed(space: Any, study: Study, state: Any) -> None:
        original(space, study, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "write_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            _run(experiment, data, tmp_path / "out", cache)
    report, said = _run(experiment, data, tmp_path / "out", cache)
    assert len(report.rows) == 1
    assert len(runs) == 2
    assert runs[0] == runs[1], "a site's ledger knows a run by its name"
    assert [line.rpartition(": ")[2] for line in said] == [TUNED, "pool-1", "corpus", "judgement"]
    report, said = _run(experiment, data, tmp_path / "out", cache)
    assert said == []


def test_a_kill_between_steps_loses_nothing(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    experiment, cache = _experiment(tiny_model, ["zero-shot"]), Cache(tmp_path / "cache")

    def interrupting(words: str) -> None:
        if words.endswith(": corpus"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Runner(experiment, data, tmp_path / "out", cache, say=interrupting).run()
    _, said = _run(experiment, data, tmp_path / "out", cache)
    assert [line.rpartition(": ")[2] for line in said] == ["corpus", "judgement"]


def test_the_budget_stops_before_a_cell_that_doesnt_fit(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    experiment = _experiment(tiny_model, ["zero-shot", "real documents"])
    runner = Runner(experiment, data, tmp_path / "out", Cache(tmp_path / "cache"))
    report = runner.run(budget_seconds=0.0)
    assert report.rows == []
    assert sorted(report.left) == ["real documents, seed 0", "zero-shot, seed 0"]
    assert all(seconds > 0 for seconds in report.left.values())
    assert "Not done" in page(experiment, [], report, {})
    assert "- zero-shot, seed 0: about" in page(experiment, [], report, {})


def test_what_takes_least_is_done_first(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    grid = [{"label": "zero-shot", "trains": "nobody", "votes": "nobody", "study.pool.size": [64, 6, 24]}]
    experiment = _experiment(tiny_model, grid=grid, tables=[])
    runner = Runner(experiment, data, tmp_path / "out", Cache(tmp_path / "cache"))
    rows = runner.run().rows
    assert [row.settings["study.pool.size"] for row in rows] == [6, 24, 64]


def test_a_model_that_is_not_there_yet_is_thought_to_take_by_its_weights(data: Path, tmp_path: Path) -> None:
    quick = Experiment.load(QUICK).model_dump(mode="json")

    def seconds(layers: int) -> float:
        made = {**quick["models"]["tiny"]["pretraining"], "layers": layers}
        experiment = Experiment.model_validate({**quick, "models": {"tiny": {"pretraining": made}}})
        cache = Cache(tmp_path / "cache")
        tasks = Runner(experiment, data, tmp_path / "out", cache, only=["strong only"]).tasks
        (step,) = (step for step in tasks[0].chain if step.kind == "tuning")
        return Estimates(cache).seconds([step], tasks[0].situation, {})

    # 12,800 weights of the tokens' vectors, 12,288 of a layer.
    assert seconds(20) / seconds(2) == pytest.approx((12_800 + 20 * 12_288) / (12_800 + 2 * 12_288))


def test_one_cell_alone_can_be_asked_for_and_results_of_others_stay(
    whole: Any, data: Path, cache: Cache, tmp_path: Path
) -> None:
    experiment, report, out, _ = whole
    runner = Runner(experiment, data, out, cache, only=["zero-shot"])
    rows = runner.run().rows
    assert [row.cell for row in rows] == ["zero-shot"]
    assert len(with_earlier(experiment, rows, read_rows(out / "results.jsonl"))) == len(report.rows)
    with pytest.raises(UserError, match="--only 'one-shot': no such cell; there are 'without noise'"):
        Runner(experiment, data, tmp_path, cache, only=["one-shot"])


def test_rows_of_another_machine_need_not_be_made_again(whole: Any, data: Path, tmp_path: Path) -> None:
    experiment, report, out, _ = whole
    rows = (out / "results.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_text("".join(rows[:-2]), encoding="utf-8")
    empty = Cache(tmp_path / "cache")

    def left(experiment: Experiment, **options: Any) -> set[str]:
        return {task.name for task in Runner(experiment, data, tmp_path, empty, **options).tasks}

    everything = {f"{row.cell}, seed {row.seed}" for row in report.rows}
    assert left(experiment, only_missing=True) == {f"{row.cell}, seed {row.seed}" for row in report.rows[-2:]}
    assert left(experiment) == everything
    # A row that was made with other settings isn't that cell's.
    settings = {**experiment.settings, "study": {**experiment.settings["study"], "corpus": {"size": 30}}}
    other = Experiment.model_validate({**experiment.model_dump(mode="json"), "settings": settings})
    assert left(other, only_missing=True) >= everything - {row for row in everything if "real documents" in row}


def test_rows_of_before_there_was_a_setting_count_where_it_has_its_default(whole: Any) -> None:
    experiment, report, _, _ = whole
    older = [
        row.model_copy(update={"settings": {k: v for k, v in row.settings.items() if k != "poisoning"}})
        for row in report.rows
    ]
    found = {row.cell for row in with_earlier(experiment, [], older)}
    poisoned = {cell.name for cell in experiment.cells if cell.cell.poisoning != "none"}
    assert poisoned
    assert found == {row.cell for row in report.rows} - poisoned


def test_a_failing_cell_is_told_and_the_others_are_made(
    tiny_model: Path, data: Path, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Step, *_: Any) -> None:
        raise DataError("no votes today")

    monkeypatch.setattr("server.experiments.voting.Vote.make", failing)
    experiment = _experiment(tiny_model, ["zero-shot", "votes on zero-shot"], codes=_renamed(QUICK))
    report, _ = _run(experiment, data, tmp_path, cache)
    assert [row.cell for row in report.rows] == ["zero-shot"]
    assert report.failed == {"votes on zero-shot, seed 0": "no votes today"}


def _renamed(quick: Path) -> dict[str, Any]:
    """Other prompts, so nothing of it is in the cache."""
    codes = Experiment.load(quick).codes.model_dump(mode="json")
    return {**codes, "preamble": "Another preamble."}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {"file": "none.jsonl"}}, "none.jsonl"),
        ({"data": {"file": "nhs_feedback_9class.jsonl.gz"}}, "topic"),
        (
            {"codes": {"attributes": [{"name": "topic", "values": ["Stuff", "Staff"]}]}},
            "declare topic 'Stuff'.*'Staff'",
        ),
        ({"data": {**QUICK_DATA, "tagged_file": "none.jsonl"}}, "none.jsonl"),
        ({"settings": {"study.training.batch_size": 5000}}, "training.batch_size is 5000"),
        ({"settings": {"partition.sites": 500}}, "would hold 0 documents"),
    ],
)
def test_what_cant_work_is_told_before_anything_is_made(
    tiny_model: Path, data: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    quick = Experiment.load(QUICK).model_dump(mode="json")
    if "settings" in changes:
        changes = {"settings": {**quick["settings"], **changes["settings"]}}
    experiment = _experiment(tiny_model, ["strong only"], **changes)
    with pytest.raises(UserError, match=said):
        Runner(experiment, data, tmp_path / "out", Cache(tmp_path / "cache"))
    assert not (tmp_path / "out").exists()


def test_a_site_declares_less_than_it_has() -> None:
    for units, size_class in ((7, 7), (98, 98), (563, 560), (5655, 5600)):
        assert SiteDocuments.of("a", b"{}\n" * units, "record").size_class == size_class
    patients = "".join(json.dumps({"patient": f"p{i // 2}"}) + "\n" for i in range(40)).encode()
    assert SiteDocuments.of("a", patients, "patient").units == 20


def test_documents_that_judge_had_no_part(data: Path) -> None:
    experiment = Experiment.load(QUICK)
    found = RealData.load(experiment.data, experiment.codes, data)
    assert len(found.train) == 400
    assert not {row["text"] for row in found.train.rows} & set(found.test.texts)
    assert set(found.train.columns) == {"topic", "tone", "hospital"}
    assert "private" not in repr(found.train)
    assert found.train.rows[0]["text"] not in repr(found)


def test_the_command_writes_tables_plot_and_numbers(
    tiny_model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = QUICK.read_text(encoding="utf-8").replace("seeds = [0, 1]", "seeds = [4]")
    file = tmp_path / "quick.toml"
    file.write_text(quick, encoding="utf-8")
    arguments = ["experiment", str(file), "--data", str(data), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--only", "zero-shot", "--only", "real documents", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert sorted(row["cell"] for row in said["rows"]) == ["real documents", "zero-shot"]
    assert (tmp_path / "out" / "results.svg").read_text(encoding="utf-8").count("<svg") == 1
    text = (tmp_path / "out" / "RESULTS.md").read_text(encoding="utf-8")
    assert "pre-trained here on other public text" in text
    with Cache(tmp_path / "out" / "cache").held():
        result = CliRunner().invoke(app, [*arguments, "--estimate"])
        assert "of work" in result.stdout
        assert "another experiment is at work" in str(CliRunner().invoke(app, arguments).exception)
    result = CliRunner().invoke(app, [*arguments, "--estimate"])
    assert "of work" in result.stdout
    assert len(read_rows(tmp_path / "out" / "results.jsonl")) == 2
    # Another cache, so nothing but the rows says that there is nothing to do.
    empty = ["--cache", str(tmp_path / "empty"), "--only", "zero-shot", "--only-missing", "--json"]
    result = CliRunner().invoke(app, [*arguments, *empty])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] == []
    assert (tmp_path / "out" / "RESULTS.md").read_text(encoding="utf-8") == text


def test_a_tagger_is_taught_by_the_corpus(tiny_model: Path, data: Path, tmp_path: Path, cache: Cache) -> None:
    """Real comments name the things that are to be found; a model that has read nothing doesn't."""
    experiment = _experiment(
        tiny_model,
        ["real documents", "zero-shot"],
        data={**QUICK_DATA, "tagged_file": TAGGED},
        judging={"measures": ["entities"]},
    )
    report, _ = _run(experiment, data, tmp_path, cache)
    found = {row.cell: row.numbers for row in report.rows}
    assert found["real documents"]["entities' macro-F1"] > 0.7
    assert found["zero-shot"]["entities' macro-F1"] < 0.5


def test_patients_are_made_up_at_each_site(tiny_model: Path, data: Path) -> None:
    patients = {"study.privacy.unit": "patient", "study.privacy.codes_per_unit": 2, "documents_per_patient": 4}
    experiment = _experiment(tiny_model, grid=[{"label": "patients", **patients}], tables=[])
    documents = RealData.load(experiment.data, experiment.codes, data)
    situation = Situation(experiment, documents, experiment.cells[0].cell, 0, Cache(data))
    for site in (*situation.training_sites, *situation.voting_sites):
        named = Counter(json.loads(line)["patient"] for line in site.content.splitlines())
        assert len(named) == site.units == -(-sum(named.values()) // 4)
        assert max(named.values()) == 4


def test_a_patients_cell_is_made_behind_the_doors(tiny_model: Path, data: Path, tmp_path: Path, cache: Cache) -> None:
    patients = {"study.privacy.unit": "patient", "study.privacy.codes_per_unit": 2, "documents_per_patient": 4}
    experiment = _experiment(tiny_model, grid=[{"label": "patients", **patients}], tables=[])
    report, _ = _run(experiment, data, tmp_path, cache)
    assert not report.failed
    assert report.rows[0].notes["vote epsilon"] > 0


def test_stuffed_votes_go_to_what_the_liar_finds_worst(whole: Any, cache: Cache) -> None:
    results = {row.cell: row.results for row in whole[1].rows}
    found = {
        votes.sha256: Votes.read(votes)
        for folder in (cache.homes.parent / "votes").iterdir()
        if (votes := _made(folder)) is not None
    }
    stuffed = found[results["poisoned (poisoning=stuffed)"]["votes-1"]]
    liar = min(stuffed.ballots.profiles)
    assert stuffed.ballots.profiles[liar].sum() > 100 * len(TOPICS) * 100
    assert np.count_nonzero(stuffed.ballots.ballots[liar]) <= 3 * len(stuffed.study.codes)
    honest = found[results["refined (selection=simplex)"]["votes-1"]]
    assert honest.ballots.profiles[liar].sum() < 1000


def _made(folder: Path) -> Any:
    from server.experiments.cache import Made, _facts

    facts = _facts(folder)
    return None if facts is None else Made(folder, facts.sha256, 0.0)
