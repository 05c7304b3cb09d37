"""Canaries and attacks: what was learnt without noise is known to the model, and what was learnt with it isn't."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from server.evaluation.texts import Texts
from server.evaluation.vectors import Vectors
from server.experiments.cache import Cache
from server.experiments.canaries import REFERENCES, Canaries
from server.experiments.data import RealData
from server.experiments.judges import LOWER_IS_BETTER, Judged, judge
from server.experiments.plan import Experiment
from server.experiments.runner import Runner
from server.experiments.situation import Situation
from tests.experiment_data import write_data

QUICK = Path(__file__).parents[2] / "benchmarks" / "paper" / "quick.toml"
CANARIES, COPIES = 2, 80


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("public"))


def _experiment(base: Path, *grid: Mapping[str, Any]) -> Experiment:
    """IID, as documents that differ from the test texts would look like members."""
    quick = Experiment.load(QUICK).model_dump(mode="json")
    settings = quick["settings"]
    settings["partition"] = {"sites": 4, "strong_share": 0.25}
    settings["study"] |= {
        "generator": {"rank": 8, "alpha": 16.0, "max_tokens": 80},
        "training": {"rounds": 3, "steps": 12, "batch_size": 48, "learning_rate": 3e-2},
        "federation": {"max_units": 10**4},
    }
    return Experiment.model_validate(
        {
            **quick,
            "models": {"tiny": {"base": str(base)}},
            "seeds": [0],
            "judging": {"measures": ["leaks"], "most": 120},
            "grid": grid,
            "tables": [],
        }
    )


def _canaries(label: str, **settings: Any) -> Mapping[str, Any]:
    return {"label": label, "votes": "nobody", "canaries": CANARIES, "canary_copies": COPIES, **settings}


@pytest.fixture(scope="module")
def numbers(tiny_model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, float]]:
    experiment = _experiment(
        tiny_model,
        _canaries("without noise", noise=False),
        # The same in all else, also the unit: a cap on a patient's documents would hide what noise does.
        _canaries("with noise"),
        {"label": "nobody learnt", "trains": "nobody"},
    )
    folder = tmp_path_factory.mktemp("leaks")
    report = Runner(experiment, data, folder / "out", Cache(folder / "cache")).run()
    assert not report.failed
    return {row.cell: row.numbers for row in report.rows}


def test_a_model_knows_the_secrets_that_it_learnt_without_noise(numbers: Mapping[str, dict[str, float]]) -> None:
    # By chance, two canaries have more than 7 bits once in a thousand times.
    assert numbers["without noise"]["exposure, model"] > 7
    assert numbers["with noise"]["exposure, model"] < 7


def test_leaks_are_measured_where_something_can_have_leaked(numbers: Mapping[str, dict[str, float]]) -> None:
    assert set(numbers["with noise"]) == {
        *("membership AUC, model", "members found at 1 %, model", "exposure, model"),
        *("membership AUC, corpus", "members found at 1 %, corpus", "exposure, corpus"),
        *("texts nearer to documents", "canaries in the corpus"),
    }
    assert all(name.startswith(LOWER_IS_BETTER) for name in numbers["with noise"])
    assert numbers["nobody learnt"] == {}


@pytest.mark.parametrize("copied", [False, True])
def test_a_corpus_that_says_a_secret_gives_it_away(copied: bool) -> None:
    canaries = Canaries.made_up(2, {"topic": "Staff"}, seed=0)
    texts = ("The nurse was kind.",) * 40 + (canaries.planted if copied else canaries.references[:2])
    corpus, real = Texts("corpus", texts), Texts("real", tuple(f"Comment {i} on a ward." for i in range(60)))
    judged = Judged(
        corpus=corpus, test=real, attribute="topic", unseen=frozenset(), vectors=Vectors("wordllama"),
        encoder=None, sentences=None, attacked=(real, real), canaries=canaries, most=100, seed=0,
    )  # fmt: skip
    found = judge(judged, ["leaks"])
    assert found["canaries in the corpus"] == (2 if copied else 0)
    assert (found["exposure, corpus"] > 8) == copied
    for name in ("texts nearer to documents", "membership AUC, corpus"):
        assert found[name] == pytest.approx(0.5), "both sides are the same"


def test_the_first_site_that_trains_holds_the_canaries(data: Path, tmp_path: Path) -> None:
    patients = {"study.privacy.unit": "patient", "documents_per_patient": 4}
    experiment = _experiment(tmp_path, _canaries("planted", **patients, **{"partition.strong_share": 0.5}))
    documents = RealData.load(experiment.data, experiment.codes, data)
    situation = Situation(experiment, documents, experiment.cells[0].cell, 0, Cache(tmp_path))
    first, second = ([json.loads(line) for line in site.content.splitlines()] for site in situation.training_sites)
    canaries = situation.canaries
    assert canaries is not None
    held = Counter(row["text"] for row in first if row["text"] in canaries.planted)
    assert held == dict.fromkeys(canaries.planted, COPIES)
    assert len({row["patient"] for row in first if row["text"] in canaries.planted}) == CANARIES
    assert not {row["text"] for row in second} & set(canaries.all)
    assert situation.training_sites[0].units == 25 + CANARIES
    members, others = situation.attacked
    assert len(members) == len(others)
    assert not set(members.texts) & set(canaries.all), "they would be found by the attack on members"


def test_nobody_plants_a_reference() -> None:
    canaries = Canaries.made_up(50, {"topic": "Staff"}, seed=3)
    assert len(canaries.references) == REFERENCES
    assert len(set(canaries.all)) == 50 + REFERENCES
    assert canaries == Canaries.made_up(50, {"topic": "Staff"}, seed=3)
    assert canaries.sha256 != Canaries.made_up(50, {"topic": "Staff"}, seed=4).sha256


@pytest.mark.parametrize("cell", [{"trains": "nobody"}, {"source": "documents"}])
def test_somebody_has_to_learn_them(tmp_path: Path, cell: Mapping[str, str]) -> None:
    with pytest.raises(ValidationError, match="canaries is 2, and nobody trains who could learn them"):
        _experiment(tmp_path, _canaries("none", **cell))


def test_numbers_that_are_cut_off_are_told(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    experiment = _experiment(tiny_model, _canaries("cut", noise=False, **{"study.generator.max_tokens": 56}))
    report = Runner(experiment, data, tmp_path / "out", Cache(tmp_path / "cache")).run()
    assert "generator.max_tokens is 56" in report.failed["cut, seed 0"]
    assert "take more tokens" in report.failed["cut, seed 0"]
