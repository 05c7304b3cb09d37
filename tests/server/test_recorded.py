"""A run that is killed while it generates goes on after the last text that it wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.models.generator import Generator
from common.study import Study
from server.generation import TextSampler
from server.recorded import RecordedSampler
from server.workspace import Workspace
from tests.hospitals import small_study

WANTED = np.array([4, 3, 2, 1])


class _Killed(Exception):
    """The process ends here."""


def _sampler(base: Path, folder: Path, run_id: str = "run") -> RecordedSampler:
    study = Study.model_validate(small_study(base, pool={"batch_size": 2}))
    return RecordedSampler(TextSampler(Generator(study.generator), study), Workspace(folder).create(), run_id)


def _die_at(texts: int, made: int, _wanted: int) -> None:
    if made == texts:
        raise _Killed


def test_a_killed_generation_goes_on_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    whole = _sampler(tiny_model, tmp_path / "whole").sample(WANTED, lambda *_: None, series="pool")
    killed = _sampler(tiny_model, tmp_path / "run")
    with pytest.raises(_Killed):
        killed.sample(WANTED, lambda *made: _die_at(5, *made), series="pool")
    again = _sampler(tiny_model, tmp_path / "run")
    requests: list[int] = []
    asked = again.plain._request
    again.plain._request = lambda order, series: requests.append(order.code) or asked(order, series)
    assert again.sample(WANTED, lambda *_: None, series="pool") == whole
    assert 0 < len(requests) <= 10 - 5, "what was written isn't generated again"
    again.forget()
    assert not again._folder.exists()


def test_texts_of_another_run_or_place_are_not_taken(tiny_model: Path, tmp_path: Path) -> None:
    first = _sampler(tiny_model, tmp_path).sample(WANTED, lambda *_: None, series="pool")
    told: list[int] = []
    other = _sampler(tiny_model, tmp_path, "other")
    asked = other.plain._request
    other.plain._request = lambda order, series: told.append(order.code) or asked(order, series)
    assert other.sample(WANTED, lambda *_: None, series="pool") == first, "the same place gives the same texts"
    assert len(told) >= 10, "but they are made anew"
    assert _sampler(tiny_model, tmp_path).sample(WANTED, lambda *_: None, series="choice") != first
