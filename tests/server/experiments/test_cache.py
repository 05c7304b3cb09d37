"""Results that are kept: made once, whole or not at all, and made anew when what they depend on changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import server.experiments.cache as module
from common.errors import UserError
from server.experiments.cache import Cache, Earlier, Made, Step


class Written(Step):
    """Writes what it is given, and counts how often."""

    kind = "written"
    sources = ("server/experiments/notes.py",)

    def __init__(self, text: str, fails: bool = False) -> None:
        self._text, self._fails, self.times, self.found = text, fails, 0, ""

    @property
    def units(self) -> float:
        return float(len(self._text))

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        return {"text": self._text, "earlier": [made.sha256 for made in earlier.values()]}

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        self.times += 1
        begun = work / "begun"
        self.found = begun.read_text() if begun.exists() else ""
        begun.write_text("half")
        (out / "text").write_text(self._text)
        if self._fails:
            raise KeyboardInterrupt


def test_a_result_is_made_once(tmp_path: Path) -> None:
    step, cache = Written("a"), Cache(tmp_path)
    assert cache.find(step, {}) is None
    made = cache.make(step, {})
    assert (made.folder / "text").read_text() == "a"
    assert cache.make(step, {}) == made
    assert cache.make(Written("a"), {}) == made
    assert step.times == 1


def test_another_input_and_another_earlier_result_are_another_result(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    first = cache.make(Written("a"), {})
    assert cache.find(Written("b"), {}) is None
    assert cache.find(Written("a"), {"before": first}) is None
    assert cache.make(Written("b"), {}).sha256 != first.sha256


def test_a_result_of_other_code_is_made_anew_unless_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    cache.make(Written("a"), {})
    monkeypatch.setattr(module, "code_sha256", lambda sources: "another")
    assert cache.find(Written("a"), {}) is None
    assert Cache(tmp_path, trusting=True).find(Written("a"), {}) is not None
    step = Written("a")
    cache.make(step, {})
    assert step.times == 1
    assert cache.find(Written("a"), {}) is not None


def test_a_killed_step_leaves_no_result_and_finds_its_work_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cache.make(Written("a", fails=True), {})
    assert cache.find(Written("a"), {}) is None
    step = Written("a")
    assert cache.make(step, {}).seconds >= 0
    assert step.found == "half"
    assert not list((tmp_path / "work").iterdir())


def test_rates_are_of_a_kind_and_rate(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.seconds_a_unit("written", "") is None
    cache.make(Written("abc"), {})
    assert cache.seconds_a_unit("written", "") is not None
    assert cache.seconds_a_unit("written", "other") is None


def test_two_experiments_dont_work_in_one_cache(tmp_path: Path) -> None:
    with Cache(tmp_path).held(), pytest.raises(UserError, match="another experiment"), Cache(tmp_path).held():
        pass


def test_code_is_what_the_sources_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PACKAGES", tmp_path)
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("one")
    before = module.code_sha256.__wrapped__(("room",))
    assert module.code_sha256.__wrapped__(("room/a.py",)) == before
    (tmp_path / "room" / "a.py").write_text("two")
    assert module.code_sha256.__wrapped__(("room",)) != before


def test_sources_of_all_steps_are_there() -> None:
    from server.experiments import assembling, estimate, judging, pooling, pretraining, tuning, voting

    kinds = [
        assembling.Corpus, assembling.RealCorpus, estimate.Trial, judging.Judgement, pooling.Pool, pooling.VariedPool,
        pretraining.PretrainedModel, tuning.PrivateTuning, tuning.PlainTuning, voting.Vote,
    ]  # fmt: skip
    for kind in kinds:
        for source in kind.sources:
            assert (module._PACKAGES / source).exists(), f"{kind.__name__}: {source}"
    assert len({kind.kind for kind in kinds}) == len(kinds)


def test_a_result_knows_where_it_is(tmp_path: Path) -> None:
    made = Cache(tmp_path).make(Written("a"), {})
    assert made == Made(made.folder, module._facts(made.folder).sha256, made.seconds)  # type: ignore[union-attr]
