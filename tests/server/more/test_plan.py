"""Shards add up to what was ordered, each is a small corpus, and sizes are those that the run's corpus had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.protocol import CandidatePool
from common.study import Study
from server.assembly import assemble_corpus
from server.more.plan import run_sizes, shard_sizes, shards_for
from server.strategies.profile_and_vote import Ballots
from tests.hospitals import small_study


@given(
    ordered=st.lists(st.integers(0, 10**6), min_size=1, max_size=30), per_shard=st.integers(1, 10**5)
)  # fmt: skip
def test_shards_have_every_ordered_text_once(ordered: list[int], per_shard: int) -> None:
    wanted = np.array(ordered, dtype=np.int64)
    shards = min(shards_for(wanted, per_shard), 50)
    parts = np.stack([shard_sizes(wanted, shard, shards) for shard in range(shards)])
    assert (parts >= 0).all()
    assert parts.sum(axis=0).tolist() == ordered
    assert np.abs(parts - wanted / shards).max() <= 1 + 1e-6, "every shard has the whole's proportions"


def test_rare_codes_are_spread_over_the_shards() -> None:
    wanted = np.ones(10_000, dtype=np.int64)
    sizes = [int(shard_sizes(wanted, shard, 20).sum()) for shard in range(20)]
    assert min(sizes) > 450
    assert max(sizes) < 550


def test_more_texts_than_memory_could_hold_make_shards_all_the_same() -> None:
    wanted = np.array([10**15, 1, 0])
    shards = shards_for(wanted, 20_000)
    assert shard_sizes(wanted, 0, shards).sum() <= 20_001
    assert shard_sizes(wanted, shards - 1, shards).sum() <= 20_001


class _Silent:
    """A sampler that gives nothing."""

    def sample(self, *_: object, series: str = "") -> list[object]:
        return []


@pytest.mark.parametrize("votes", [True, False])
@pytest.mark.parametrize("unit", ["record", "patient"])
def test_sizes_are_those_that_the_corpus_was_divided_by(unit: str, votes: bool) -> None:
    privacy = {"unit": unit, "codes_per_unit": 2 if unit == "patient" else 1}
    study = Study.model_validate(small_study(Path("x"), privacy=privacy))
    source = np.random.default_rng(0)
    profiles = {name: source.integers(-5, 90, 4) for name in ("north", "south", "east", "west")}
    pool = CandidatePool(tuple(map(str, range(24))), np.repeat(np.arange(4, dtype=np.int32), 6))
    ballots = {name: source.integers(-5, 20, 24) for name in ("east", "west")} if votes else {}
    strong = [profile for name, profile in profiles.items() if name not in ballots]
    cast = Ballots({name: profiles[name] for name in ballots}, ballots)
    corpus = assemble_corpus(study, pool, strong, cast, _Silent())
    assert run_sizes(study, profiles, ballots, pool.codes).tolist() == corpus.sizes.tolist()
