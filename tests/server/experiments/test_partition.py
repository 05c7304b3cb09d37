"""Partitions: every document is at one site, and sites are as different as was asked."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from common.errors import DataError
from server.experiments.partition import Partition, Split, partition

TOPICS = ("a", "b", "c", "d", "e")


def _columns(documents: int, seed: int = 0) -> dict[str, list[str]]:
    chance = np.random.default_rng(seed)
    return {
        "topic": [TOPICS[i] for i in chance.choice(5, size=documents, p=[0.4, 0.3, 0.15, 0.1, 0.05])],
        "hospital": [f"h{i % 3}" for i in range(documents)],
    }


def _shared(kind: str, documents: int = 1000, seed: int = 0, **options: Any) -> tuple[Split, dict[str, list[str]]]:
    columns = _columns(documents)
    return partition(Partition(kind=kind, **options), columns, documents, seed), columns


def _values(split: Split, columns: dict[str, list[str]], site: int, by: str = "topic") -> Counter[str]:
    return Counter(columns[by][i] for i in split.sites[site])


KINDS: dict[str, dict[str, Any]] = {
    "iid": {},
    "strong-classes": {"by": "topic", "strong_classes": 2},
    "dirichlet": {"by": "topic", "alpha": 0.4},
    "natural": {"by": "hospital", "sites": 2},
}


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    documents=st.integers(60, 400),
    seed=st.integers(0, 5),
    share=st.floats(0.1, 0.9),
    sites=st.integers(3, 9),
)
def test_every_document_is_at_exactly_one_site(kind: str, documents: int, seed: int, share: float, sites: int) -> None:
    options = {"sites": sites, "strong_share": share, **KINDS[kind], "fewest": 1}
    try:
        split, _ = _shared(kind, documents, seed, **options)
    except DataError:
        # So many sites of so few documents, or all of them strong: told, as another test shows.
        assume(False)
    assert sorted(np.concatenate(split.sites).tolist()) == list(range(documents))
    assert split.strong <= set(range(len(split.sites)))
    assert set(split.weak) | split.strong == set(range(len(split.sites)))
    expected = max(1, round(share * len(split.sites)))
    assert len(split.strong) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_partition_and_another_seed_another(kind: str) -> None:
    first, again, other = (_shared(kind, seed=seed, **KINDS[kind])[0] for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first.sites, again.sites, strict=True))
    assert first.strong == again.strong
    assert any(not np.array_equal(a, b) for a, b in zip(first.sites, other.sites, strict=True))


def test_iid_sites_are_equal_in_size_and_alike() -> None:
    split, columns = _shared("iid", 5003, sites=10)
    assert sorted({len(site) for site in split.sites}) == [500, 501]
    shares = [_values(split, columns, site)["a"] / 500 for site in range(10)]
    assert max(shares) - min(shares) < 0.15


def test_sites_of_unequal_size_grow_as_asked() -> None:
    split, _ = _shared("iid", 550, sites=10, growth=1.0)
    assert [len(site) for site in split.sites] == [10 * i for i in range(1, 11)]


def test_strong_sites_hold_their_classes_only_and_weak_ones_hold_all() -> None:
    split, columns = _shared("strong-classes", 4000, by="topic", strong_values=("a", "b"), sites=10, strong_share=0.3)
    assert split.strong == {0, 1, 2}
    for site in split.strong:
        assert set(_values(split, columns, site)) == {"a", "b"}
        assert len(split.sites[site]) == 400, "as many as in an IID partition"
    for site in split.weak:
        assert set(_values(split, columns, site)) == set(TOPICS)


def test_strong_sites_leave_weak_ones_a_share_of_a_rare_class() -> None:
    split, columns = _shared(
        "strong-classes", 4000, by="topic", strong_values=("e",), sites=10, strong_share=0.5, strong_most=0.6
    )
    held = sum(_values(split, columns, site)["e"] for site in split.strong)
    assert held == int(0.6 * columns["topic"].count("e"))


def test_a_small_alpha_makes_sites_differ_and_a_large_one_doesnt() -> None:
    def most(alpha: float) -> float:
        split, columns = _shared("dirichlet", 3000, by="topic", alpha=alpha, sites=6)
        tables = [_values(split, columns, site) for site in range(6)]
        return float(np.mean([max(table.values()) / table.total() for table in tables]))

    assert most(0.1) > most(100.0) + 0.2
    assert most(100.0) == pytest.approx(0.4, abs=0.06)


def test_natural_sites_are_hospitals_and_may_be_wards() -> None:
    split, columns = _shared("natural", by="hospital", sites=2, strong_values=("h1",))
    assert [set(_values(split, columns, site, "hospital")) for site in range(6)] == [
        {"h0"}, {"h0"}, {"h1"}, {"h1"}, {"h2"}, {"h2"},
    ]  # fmt: skip
    assert split.strong == {2, 3}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "dirichlet"}, "by is missing"),
        ({"kind": "strong-classes", "by": "topic"}, "either strong_values or strong_classes"),
        ({"kind": "natural", "by": "hospital", "growth": 1.0}, "growth is 1"),
        ({"kind": "iid", "sites": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_dont_fit_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Partition(**options)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("dirichlet", {"by": "ward"}, r"partition.by is 'ward'; the data has \['hospital', 'topic'\]"),
        ("natural", {"by": "hospital", "strong_values": ("h9",)}, "strong_values has 'h9'"),
        ("strong-classes", {"by": "topic", "strong_values": ("z",)}, "strong_values has 'z'"),
        ("strong-classes", {"by": "topic", "strong_classes": 9}, "strong_classes is 9"),
        ("strong-classes", {"by": "topic", "strong_classes": 2, "strong_share": 1.0}, "at least one of each tier"),
        ("iid", {"sites": 20, "fewest": 51}, "would hold 50 documents and at least 51 are needed"),
    ],
)
def test_data_that_doesnt_fit_is_a_clear_error(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        _shared(kind, **options)
