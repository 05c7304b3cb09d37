"""Documents of several codes: one more of them moves at most c cells of the profile and R votes, by one each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_weak.neighbours import nearest_candidates
from common.models.embedder import load_embedder
from common.privacy.bounding import profile_counts, vote_counts
from common.site.config import Site
from common.site.documents import Documents
from common.study import Study
from tests.hospitals import small_study, write_site

TOPICS = ("Staff", "Food", "Parking", "Ward")
WORDS = ("kind", "cold", "loud", "late", "clean", "dear")


def study(codes_per_unit: int, votes_per_unit: int) -> Study:
    made = small_study(
        Path("tiny"),
        codes={"attributes": [{"name": "topic", "values": list(TOPICS), "multiple": True}]},
        privacy={"codes_per_unit": codes_per_unit},
    )
    return Study.model_validate(made | {"voting": {"neighbours": 3, "votes_per_unit": votes_per_unit}})


def rows(number: int, seed: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [
        {
            "text": " ".join(random.choice(WORDS, 4)),
            "topic": random.choice(TOPICS, random.integers(1, 5), replace=False).tolist(),
        }
        for _ in range(number)
    ]


def counted(folder: Path, made: list[dict[str, Any]], of: Study, *, as_units: bool = True) -> tuple[Any, Any]:
    """Exact profile and exact votes; without ``as_units`` every code of a document counts as a unit of its own."""
    site = write_site(folder / str(len(made)), "north", "weak", made)
    documents = Documents.load(Site.load(site), of)
    units = documents.units if as_units else np.arange(len(documents), dtype=np.int32)
    embedder = load_embedder(of.voting)
    pool = [f"{word} {other}" for word in WORDS for other in WORDS]
    codes = np.arange(len(pool)) % len(TOPICS)
    nearest = nearest_candidates(
        embedder.embed(documents.texts), documents.codes, embedder.embed(pool), codes, neighbours=of.neighbours
    )
    profile = profile_counts(
        documents.codes, units, number_of_codes=len(of.codes), codes_per_unit=of.privacy.codes_per_unit
    )
    votes = vote_counts(nearest, units, candidates=len(pool), votes_per_unit=of.votes_per_unit)
    return profile.counts, votes.counts


def moved(folder: Path, of: Study, more: list[str], *, as_units: bool = True) -> list[tuple[int, int]]:
    """(cells, most in one cell) by which one more document moves profile and votes."""
    others = rows(40, seed=1)
    without = counted(folder, others, of, as_units=as_units)
    including = counted(folder, [*others, {"text": "kind but cold", "topic": more}], of, as_units=as_units)
    changes = [np.abs(a - b) for a, b in zip(including, without, strict=True)]
    return [(int(change.sum()), int(change.max())) for change in changes]


@pytest.mark.parametrize(("codes_per_unit", "votes_per_unit"), [(2, 3), (2, 6), (4, 3), (3, 12)])
@pytest.mark.parametrize("more", [["Food"], ["Ward", "Staff"], list(TOPICS)])
def test_one_document_more_moves_what_was_promised(
    tmp_path: Path, codes_per_unit: int, votes_per_unit: int, more: list[str]
) -> None:
    (cells, by), (votes, once) = moved(tmp_path, study(codes_per_unit, votes_per_unit), more)
    assert (cells, by) == (min(len(more), codes_per_unit), 1)
    assert votes <= votes_per_unit
    assert once == 1


def test_twin_with_a_unit_for_every_code_moves_more(tmp_path: Path) -> None:
    _, (votes, _) = moved(tmp_path, study(4, 3), list(TOPICS), as_units=False)
    assert votes == 12
