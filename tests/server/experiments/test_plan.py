"""What an experiment's file may say, and how a mistake is told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from common.configuration import first_problem
from common.errors import UserError
from server.experiments.plan import Experiment

PAPER = Path(__file__).parents[2] / "benchmarks" / "paper"

MINIMAL: dict[str, Any] = {
    "name": "small",
    "title": "Small",
    "codes": {"attributes": [{"name": "topic", "values": ["a", "b"]}]},
    "data": {"file": "data.jsonl"},
    "models": {"tiny": {"base": "package:none"}},
    "settings": {"study": {"privacy": {"epsilon": 8.0, "delta": 1e-4}}},
    "grid": [{"label": "refined", "study.pool.size": [100, 200], "partition.strong_share": [0.2, 0.4]}],
}


def _with(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(MINIMAL), **changes}


def test_a_grid_is_the_product_of_its_lists() -> None:
    cells = Experiment.model_validate(MINIMAL).cells
    assert [cell.name for cell in cells] == [
        "refined (size=100, strong_share=0.2)",
        "refined (size=100, strong_share=0.4)",
        "refined (size=200, strong_share=0.2)",
        "refined (size=200, strong_share=0.4)",
    ]
    assert [cell.cell.template.pool.size for cell in cells] == [100, 100, 200, 200]
    assert [cell.cell.settings["partition.strong_share"] for cell in cells] == [0.2, 0.4, 0.2, 0.4]


def test_a_list_that_is_a_setting_is_no_list_of_cells() -> None:
    partition = {"kind": "strong-classes", "by": "topic", "strong_values": ["a"]}
    cells = Experiment.model_validate(_with(grid=[{"label": "one", "partition": partition}])).cells
    assert len(cells) == 1
    many = {**partition, "strong_values": [["a"], ["b"]]}
    cells = Experiment.model_validate(_with(grid=[{"label": "two", "partition": many}])).cells
    assert [cell.cell.partition.strong_values for cell in cells] == [("a",), ("b",)]


def test_settings_of_a_grid_come_before_those_of_all_cells() -> None:
    grid = [{"label": "one", "study.privacy.epsilon": 2.0}, {"label": "two"}]
    cells = Experiment.model_validate(_with(grid=grid)).cells
    assert [cell.cell.template.privacy.epsilon for cell in cells] == [2.0, 8.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grid": [{"label": "one", "study.pool.sice": 3}]}, "grid, table 1: pool.sice: unknown key"),
        ({"grid": [{"label": "one", "study.pool.size": 0}]}, "grid, table 1: pool.size: 0 isn't accepted"),
        ({"grid": [{"label": "one", "selection": "x"}]}, "grid, table 1: selection: unknown key"),
        ({"grid": [{"study.pool.size": 3}]}, "grid, table 1: label: missing"),
        ({"grid": [{"label": "one", "model": "large"}]}, "model is 'large'; ['tiny'] are declared"),
        ({"grid": [{"label": "one", "trains": "some"}]}, "trains: 'some' isn't accepted"),
        ({"grid": [{"label": "one", "trains": "all"}]}, "nobody is left to vote"),
        ({"grid": [{"label": "one", "votes": "all"}]}, "trains has to be 'nobody'"),
        ({"grid": [{"label": "one", "votes": "nobody", "iterations": 2}]}, "iterations are rounds of votes"),
        ({"grid": [{"label": "one", "votes": "nobody", "poisoning": "stuffed"}]}, "poisoning is 'stuffed'"),
        ({"grid": [{"label": "one"}, {"label": "one"}]}, "two cells are called 'one'"),
        ({"grid": []}, "no cells"),
        ({"seeds": []}, "seeds is []"),
        ({"seeds": [1, 1]}, "seeds is [1, 1]"),
        ({"judging": {"measures": ["beauty"]}}, "measures has 'beauty'"),
        ({"judging": {"measures": ["fine-tuned"]}}, "encoder is missing"),
        ({"judging": {"measures": ["entities"]}}, "data.tagged_file is missing"),
        ({"grid": [{"label": "one", "documents_per_patient": 3}]}, "privacy.unit isn't 'patient'"),
        ({"judging": {"attribute": "tone"}}, "judging.attribute is 'tone'; the codes have ['topic']"),
        ({"models": {"tiny": {}}}, "either a base or a pretraining"),
        ({"tables": [{"title": "T", "measure": "m", "labels": ["nobody"]}]}, "'T' names 'nobody'"),
        ({"tables": [{"title": "T", "measure": "m", "gap": ["a", "b", "c"]}]}, "the gap of 'T' names 'a'"),
        ({"tables": [{"title": "T", "measure": "m", "columns": "study.pool.sice"}]}, "which no cell has"),
        ({"settings": {}}, "privacy: missing"),
    ],
)
def test_a_mistake_is_told_with_its_place(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Experiment.model_validate(_with(**changes))
    assert said in first_problem(caught.value)


def test_a_file_that_isnt_there_or_isnt_toml_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        Experiment.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(UserError, match="not valid TOML"):
        Experiment.load(tmp_path / "bad.toml")


def test_what_a_file_leaves_out_is_taken_from_the_one_it_extends_and_so_on(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "first.toml").write_text(
        'title = "First"\nname = "first"\nseeds = [5]\n'
        '[codes]\nattributes = [{ name = "topic", values = ["a", "b"] }]\n'
        '[data]\nfile = "data.jsonl"\n[models.tiny]\nbase = "package:none"\n'
        "[settings.study]\nprivacy = { epsilon = 8.0, delta = 1e-4 }\npool = { size = 100 }\n"
    )
    (tmp_path / "deep" / "second.toml").write_text(
        'extends = "first.toml"\nname = "second"\n[settings.study.pool]\nsize = 200\nmax_new_tokens = 9\n'
    )
    (tmp_path / "third.toml").write_text(
        'extends = "deep/second.toml"\nname = "third"\ngrid = [{ label = "one", "study.pool.size" = 300 }]\n'
    )
    found = Experiment.load(tmp_path / "third.toml")
    assert (found.name, found.title, found.seeds) == ("third", "First", (5,))
    assert found.cells[0].cell.template.pool.size == 300
    assert found.cells[0].cell.template.pool.max_new_tokens == 9


def test_files_that_extend_each_other_are_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('extends = "two.toml"\n')
    (tmp_path / "two.toml").write_text('extends = "./one.toml"\n')
    with pytest.raises(UserError, match=r"one\.toml: extends leads back to this file"):
        Experiment.load(tmp_path / "one.toml")


@pytest.mark.parametrize("file", sorted(PAPER.glob("*.toml")), ids=lambda file: file.stem)
def test_every_experiment_of_the_paper_can_be_read(file: Path) -> None:
    experiment = Experiment.load(file)
    assert experiment.name == file.stem
    assert len(experiment.seeds) >= (2 if file.stem == "quick" else 3)
    assert experiment.tables
