"""What one cell had written is there for the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.protocol import CandidatePool
from common.study import Study
from server.experiments import written
from server.experiments.written import KeptTexts
from server.generation import SyntheticText, TextSampler
from tests.hospitals import small_study


@pytest.fixture
def study(tiny_model: Path) -> Study:
    return Study.model_validate(small_study(tiny_model))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts were really written, call by call."""
    real, calls = TextSampler.sample, list[int]()

    def sample(self: TextSampler, wanted: Any, *rest: Any, **named: Any) -> list[SyntheticText]:
        calls.append(int(wanted.sum()))
        return real(self, wanted, *rest, **named)

    monkeypatch.setattr(TextSampler, "sample", sample)
    return calls


def _wanted(study: Study, each: int) -> Any:
    return np.full(len(study.codes), each, dtype=np.int64)


def _pool(texts: list[SyntheticText] = []) -> CandidatePool:  # noqa: B006
    return CandidatePool(tuple(t.text for t in texts), np.array([t.code for t in texts], dtype=np.int32))


def _kept(folder: Path, study: Study, made_by: str = "adapter", pool: CandidatePool | None = None) -> KeptTexts:
    return KeptTexts(folder, {"made": made_by}, study, pool or _pool(), {})


def test_another_cell_takes_what_is_there_and_only_what_is_missing_is_written(
    tmp_path: Path, study: Study, asked: list[int]
) -> None:
    first = _kept(tmp_path, study).sample(_wanted(study, 5), series="choice")
    assert [t.code for t in first] == sorted(list(range(len(study.codes))) * 5)
    # Twenty per cent to spare.
    assert asked == [6 * len(study.codes)]
    assert _kept(tmp_path, study).sample(_wanted(study, 5), series="choice") == first
    fewer = _kept(tmp_path, study).sample(_wanted(study, 2), series="choice")
    assert set(fewer) < set(first)
    assert len(asked) == 1
    more = _kept(tmp_path, study).sample(_wanted(study, 9), series="choice")
    assert set(first) < set(more)
    assert asked[1:] == [4 * len(study.codes)]
    assert len(set(more)) == len(more) == 9 * len(study.codes)


def test_no_text_is_one_of_the_pool_or_of_another_series(tmp_path: Path, study: Study) -> None:
    pooled = TextSampler(written.loaded(study, None), study).sample(_wanted(study, 4), series="choice, after 0")
    # The same series as the pool's: without what it remembers, it would write the same texts.
    sampler = _kept(tmp_path, study, pool=_pool(pooled))
    choice = sampler.sample(_wanted(study, 4), series="choice")
    topped_up = sampler.sample(_wanted(study, 4), series="top-up")
    assert len({t.text for t in [*pooled, *choice, *topped_up]}) == 12 * len(study.codes)
    forgetful = _kept(tmp_path / "other", study).sample(_wanted(study, 4), series="choice")
    assert {t.text for t in forgetful} & {t.text for t in pooled}


def test_what_another_adapter_wrote_is_not_taken(tmp_path: Path, study: Study, asked: list[int]) -> None:
    _kept(tmp_path, study).sample(_wanted(study, 2), series="choice")
    _kept(tmp_path, study, made_by="another").sample(_wanted(study, 2), series="choice")
    assert len(asked) == 2


def test_nothing_wanted_loads_nothing(tmp_path: Path, study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "loaded", None)
    assert _kept(tmp_path, study).sample(_wanted(study, 0), series="choice") == []
    assert not list(tmp_path.iterdir())
