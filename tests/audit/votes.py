"""Audit of a weak site: replay its whole release with and without one unit, and tell the two apart.

The release is the ballot and the profile, as `client_weak.client_app` makes them, and the claim is the plan's joint
epsilon. The adversary knows all documents but whether the unit is there, so it knows by how much each cell would move.
As the noise is Gaussian, the best test projects on that difference, each cell weighted by 1 / scale^2, and one
threshold says all: midway between the two exact releases, fixed before the first replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from client_weak.votes import noisy_ballot
from common.models.embedder import Embedder, Embeddings, load_embedder
from common.privacy.accounting import WeakPlan
from common.protocol import CandidatePool
from common.site.documents import Documents
from common.site.plan import weak_plan
from common.site.profile import noisy_profile
from common.study import Study
from server.demo import prepare_demo
from tests.audit.bounds import SIGNIFICANCE, gaussian_epsilon, gdp_mu_bound
from tests.audit.finding import Audit, Measurement, Progress, quiet
from tests.hospitals import NHS_FEEDBACK, small_study

EPSILON, DELTA, NEIGHBOURS = 4.0, 1e-4, 8
CANDIDATE_CODES = np.array([0] * 10 + [1] * 6, dtype=np.int32)
"""The second code has fewer candidates than K."""
OTHERS, NOTES = 12, 12
"""Documents beside the unit's, and documents of a patient."""

ALMOST_NO_NOISE = 1e-3
"""Scale in counts. The chance of a draw other than 0 is about e^-500000, so releases with it are exact."""


@dataclass(frozen=True)
class Scene:
    """A weak site with and without one unit, and the pool it votes on."""

    study: Study
    pool: CandidatePool
    without: Documents
    with_unit: Documents
    embedder: Embedder

    def release(self, documents: Documents, plan: WeakPlan) -> NDArray[np.int64]:
        """What the site sends: ballot, then profile; noised by ``plan``."""
        vectors, pool_vectors = self.embedder.embed(documents.texts), self.embedder.embed(self.pool.texts)
        ballot = noisy_ballot(documents, vectors, self.pool, pool_vectors, self.study, plan.votes)
        return np.r_[ballot.array, noisy_profile(documents, self.study, plan.profile).array]


class EmbeddedBefore:
    """An embedder that has seen all texts, so that replays are fast."""

    def __init__(self, embedder: Embedder, texts: Sequence[str]) -> None:
        # One by one: a text's vector may depend on that text alone.
        self._vectors = {text: embedder.embed([text])[0] for text in texts}

    def embed(self, texts: Sequence[str]) -> Embeddings:
        """Look the texts up."""
        return np.stack([self._vectors[text] for text in texts])


def real_texts(folder: Path, count: int) -> list[str]:
    """Texts of the demo's hospitals: patients' comments, or in a stranger's clone the packaged reviews."""
    if NHS_FEEDBACK.exists():
        prepare_demo(folder, NHS_FEEDBACK, "hospital", ("label", "sentiment"), "text")
    else:
        prepare_demo(folder, None, None, (), "text")
    file = sorted(folder.glob("hospitals/*/documents.parquet"))[0]
    # Distinct and in the file's order.
    return list(dict.fromkeys(pq.read_table(file)["text"].to_pylist()))[:count]


def scene(folder: Path, unit: str) -> Scene:
    """A site whose unit is one ``record``, or one ``patient`` with `NOTES` documents under both codes."""
    privacy = {"epsilon": EPSILON, "delta": DELTA, "unit": unit, "codes_per_unit": 2 if unit == "patient" else 1}
    study = Study.model_validate(
        small_study(folder, privacy=privacy)
        | {
            "codes": {"attributes": [{"name": "topic", "values": ["staff", "parking"]}]},
            "voting": {"neighbours": NEIGHBOURS},
        }
    )
    notes = NOTES if unit == "patient" else 1
    texts = real_texts(folder / "demo", CANDIDATE_CODES.size + OTHERS + NOTES)
    candidates, documents = texts[: CANDIDATE_CODES.size], texts[CANDIDATE_CODES.size :]
    others, own = _Notes(documents[:OTHERS], OTHERS), _Notes(documents[OTHERS : OTHERS + notes], 1)
    return Scene(
        study,
        CandidatePool(tuple(candidates), CANDIDATE_CODES),
        _documents(others),
        # The unit comes first: if it moved other units' votes by their order or number, the difference would show it.
        _documents(own, others),
        EmbeddedBefore(load_embedder(study.voting), texts),
    )


@dataclass(frozen=True)
class _Notes:
    """Documents under both codes in turn, of this many units in turn."""

    texts: Sequence[str]
    units: int


def _documents(*parts: _Notes) -> Documents:
    numbers = [np.arange(len(part.texts), dtype=np.int32) for part in parts]
    before = np.cumsum([0, *(part.units for part in parts)], dtype=np.int32)
    return Documents(
        tuple(text for part in parts for text in part.texts),
        np.concatenate(numbers) % np.int32(2),
        np.concatenate(
            [first + n % np.int32(part.units) for first, n, part in zip(before, numbers, parts, strict=False)]
        ),
    )


def as_it_ships(scene: Scene) -> tuple[Scene, WeakPlan]:
    """The site and its plan, nothing changed."""
    return scene, weak_plan(scene.study)


def less_noise(scene: Scene, factor: float) -> tuple[Scene, WeakPlan]:
    """Twin: all noise times ``factor``."""
    return scene, _scaled(weak_plan(scene.study), factor, factor)


def sensitivity_one(scene: Scene) -> tuple[Scene, WeakPlan]:
    """Twin: vote noise for a unit that moves one cell, where it moves K; the square root of K is forgotten."""
    plan = weak_plan(scene.study)
    return scene, _scaled(plan, 1 / math.sqrt(plan.votes.cells_per_unit), 1.0)


def no_noise(scene: Scene) -> tuple[Scene, WeakPlan]:
    """Twin: next to no noise."""
    return scene, _noiseless(weak_plan(scene.study))


def every_note_a_unit(scene: Scene) -> tuple[Scene, WeakPlan]:
    """Twin: a patient's cap of votes is gone, as each note counts as a unit of its own."""

    def lifted(documents: Documents) -> Documents:
        return replace(documents, units=np.arange(len(documents), dtype=np.int32))

    return (
        replace(scene, without=lifted(scene.without), with_unit=lifted(scene.with_unit)),
        weak_plan(scene.study),
    )


def exact_difference(scene: Scene, plan: WeakPlan) -> NDArray[np.int64]:
    """By how much the unit moves each cell of the release."""
    without, with_unit = (scene.release(d, _noiseless(plan)) for d in (scene.without, scene.with_unit))
    return with_unit - without


def lower_bound(scene: Scene, plan: WeakPlan, replays: int, progress: Progress = quiet) -> float:
    """Epsilon at `DELTA` that the adversary's errors in ``replays`` releases on either side prove."""
    scales = np.repeat([plan.votes.scale, plan.profile.scale], [len(scene.pool), len(scene.study.codes)])
    difference = exact_difference(scene, plan)
    weights = difference / scales**2
    threshold = float(weights @ (scene.release(scene.without, _noiseless(plan)) + difference / 2))
    false_positives = false_negatives = 0
    for replay in range(replays):
        false_positives += bool(weights @ scene.release(scene.without, plan) >= threshold)
        false_negatives += bool(weights @ scene.release(scene.with_unit, plan) < threshold)
        if replay % 100 == 0:
            progress(replay / replays)
    return gaussian_epsilon(gdp_mu_bound(false_positives, false_negatives, replays, SIGNIFICANCE), DELTA)


def audits(folder: Path, replays: int, gross_replays: int) -> Iterator[Audit]:
    """All audits of the votes. To see noise x0.8 takes ``replays``; a gross mistake shows in ``gross_replays``.

    By simulation, noise x0.8 is missed once in 50,000 times at 5000 replays, once in 1600 at 4000.
    """
    record, patient = scene(folder / "record", "record"), scene(folder / "patient", "patient")
    for name, altered, count in (
        ("", as_it_ships, replays),
        ("noise x0.8", partial(less_noise, factor=0.8), replays),
        ("square root of K forgotten", sensitivity_one, gross_replays),
        ("noise off", no_noise, gross_replays),
    ):
        yield Audit("votes + profile, record", name, partial(measure, *altered(record), count))
    for name, altered, count in (("", as_it_ships, replays), ("cap of votes lifted", every_note_a_unit, gross_replays)):
        yield Audit("votes + profile, patient", name, partial(measure, *altered(patient), count))


def measure(scene: Scene, plan: WeakPlan, replays: int, progress: Progress = quiet) -> Measurement:
    """Compare the adversary's bound with the promise of the study's own plan."""
    claim = weak_plan(scene.study).epsilon
    bound = lower_bound(scene, plan, replays, progress)
    return Measurement(f"epsilon {claim:.2f} at {DELTA:g}", f"epsilon >= {bound:.2f}", refuted=bound > claim)


def _scaled(plan: WeakPlan, votes: float, profile: float) -> WeakPlan:
    return replace(
        plan,
        votes=replace(plan.votes, scale=plan.votes.scale * votes),
        profile=replace(plan.profile, scale=plan.profile.scale * profile),
    )


def _noiseless(plan: WeakPlan) -> WeakPlan:
    return _scaled(plan, ALMOST_NO_NOISE / plan.votes.scale, ALMOST_NO_NOISE / plan.profile.scale)
