"""Nearest documents: exact; copies are nearer to documents than to held-out ones, other notes are as near to both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from common.models.embedder import load_embedder
from common.site.audit import neighbours
from common.site.audit.found import NeighboursFound
from common.site.audit.groups import Groups
from common.site.audit.neighbours import FARTHEST, neighbours_found, two_nearest, unit
from common.site.audit.sources import OwnDocuments, Texts
from common.study import Voting
from tests.common.site.audit.notes import notes

DOCUMENTS, HOLDOUT = notes(300, seed=1), notes(300, seed=2)


def _neighbours(texts: Sequence[str], holdout: Sequence[str] | None = HOLDOUT) -> NeighboursFound:
    own = OwnDocuments.of(DOCUMENTS, range(len(DOCUMENTS)))
    corpus = Texts(tuple(texts), tuple(range(1, len(texts) + 1)))
    embedder = load_embedder(Voting())
    return neighbours_found(corpus, own, Groups.of(own, holdout), embedder, "any", lambda stage, share: None)


@pytest.mark.parametrize("block", [1, 50, 1 << 21])
def test_distances_are_those_of_all_pairs(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(neighbours, "BLOCK", block)
    chance = np.random.default_rng(0)
    texts, documents = (unit(chance.standard_normal((n, 8)).astype(np.float32)) for n in (20, 30))
    naive = np.sort(np.linalg.norm(texts[:, None] - documents[None], axis=2), axis=1)[:, :2]
    np.testing.assert_allclose(two_nearest(texts, documents), naive, atol=1e-5)


@pytest.mark.parametrize("documents", [0, 1])
def test_with_too_few_documents_the_nearest_is_far(documents: int) -> None:
    one = np.ones((1, 1), dtype=np.float32)
    assert two_nearest(one, one[:documents]).tolist() == [[0.0 if documents else FARTHEST, FARTHEST]]


def test_other_notes_are_as_near_to_documents_as_to_held_out_ones() -> None:
    found = _neighbours(notes(300, seed=3))
    assert found.nearer
    assert found.nearer.low < 0.5 < found.nearer.high
    assert found.bystander_distance
    assert abs(found.distance.median - found.bystander_distance.median) < 0.05
    assert found.bystander_ratio
    assert abs(found.ratio.nine_in_ten - found.bystander_ratio.nine_in_ten) < 0.1


def test_copies_are_nearer_to_documents_and_to_one_alone() -> None:
    found = _neighbours([*notes(100, seed=3), *(f"{note} Indeed." for note in DOCUMENTS[:200])])
    assert found.nearer
    assert found.nearer.low > 0.7
    assert found.bystander_ratio
    assert found.ratio.median > found.bystander_ratio.ninety_nine


def test_copies_of_held_out_documents_are_nearer_to_those() -> None:
    nearer = _neighbours(HOLDOUT).nearer
    assert nearer
    assert nearer.high < 0.1


def test_without_held_out_documents_the_ratio_is_beside_that_of_documents() -> None:
    clean, copied = _neighbours(notes(100, seed=3), None), _neighbours(DOCUMENTS[:100], None)
    assert clean.nearer is None
    assert clean.bystander_ratio
    assert clean.ratio.median < clean.bystander_ratio.nine_in_ten
    assert copied.ratio.median > 0.99


def test_a_text_that_is_two_documents_is_no_ones_in_particular() -> None:
    own = OwnDocuments.of([DOCUMENTS[0], DOCUMENTS[0], *DOCUMENTS[1:]], range(301))
    corpus, embedder = Texts((DOCUMENTS[0],), (1,)), load_embedder(Voting())
    found = neighbours_found(corpus, own, Groups.of(own, None), embedder, "any", lambda stage, share: None)
    assert found.ratio.most == 0
