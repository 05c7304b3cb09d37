"""The folder of a finished run without a model: as a run leaves it, of any size and with any outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.protocol import CandidatePool
from common.site.plan import site_plan
from common.study import Study
from server.checkpoint import Checkpoint, write_checkpoint
from server.corpus import CorpusText, write_ballots, write_corpus, write_pool, write_profiles
from server.html_report.visible import plain
from server.report import write_summary
from server.strategies.aggregation import RoundReport, SiteUpdate
from server.summary import CodeSummary, SiteSummary, Summary
from server.workspace import Workspace, write_atomically
from tests.hospitals import small_study
from tests.hostile_texts import HOSTILE

ADAPTER = {f"layers.{i}.{part}.weight": np.zeros((4, 8), np.float32) for i in range(2) for part in ("lora_A", "lora_B")}


def finished_run(
    folder: Path,
    *,
    values: Sequence[str] = ("staff", "parking", "food"),
    texts: Sequence[str] = ("One.", "Two.", "Three."),
    strong: int = 2,
    weak: int = 2,
    silent: Sequence[str] = (),
    unit: str = "record",
    profile: int | Sequence[int] = 30,
    wanted: int | Sequence[int] = 6,
    made: int | Sequence[int] = 6,
    per_code: int = 8,
    rounds: int = 2,
    votes: int = 12,
    summary: Mapping[str, Any] | None = None,
) -> Workspace:
    """A finished run.

    Parameters
    ----------
    values
        Of the one attribute: the control codes.
    strong, weak
        Sites of each tier; they are called ``strong-0`` and so on.
    silent
        Sites that never answered.
    profile, wanted, made
        Of each code, or of every one: noisy count at each site, quota, and texts in the corpus.
    per_code, votes
        Candidates of each code, and votes on one at most, at each weak site.
    summary
        Fields of the summary that are different.
    """
    folder.mkdir(parents=True, exist_ok=True)
    space, generator = Workspace(folder), np.random.default_rng(1)
    counts, quotas, texts_made = (_each(given, len(values)) for given in (profile, wanted, made))
    study = _study(values, per_code, rounds, unit, max(int(quotas.sum()), 1))
    write_atomically(space.study, study.canonical.encode())
    tiers = {f"strong-{i}": "strong" for i in range(strong)} | {f"weak-{i}": "weak" for i in range(weak)}
    answering = {name: tier for name, tier in tiers.items() if name not in silent}
    pool = CandidatePool(
        tuple(f"candidate {i}" for i in range(len(values) * per_code)),
        np.repeat(np.arange(len(values), dtype=np.int32), per_code),
    )
    ballots = {
        name: generator.integers(-3, votes, len(pool))
        for name, tier in answering.items()
        if tier == "weak" and per_code
    }
    write_pool(space.pool, pool)
    write_ballots(space.ballots, ballots)
    write_profiles(space.profiles, dict.fromkeys(answering, counts))
    write_checkpoint(space, study, Checkpoint(round=rounds, adapter=ADAPTER))
    write_corpus(
        space,
        study.codes,
        [
            CorpusText(texts[(code + i) % len(texts)], code, "candidate" if i else "top-up")
            for code, number in enumerate(texts_made)
            for i in range(number)
        ],
    )
    cast = sum(ballots.values()) if ballots else np.zeros(len(pool), np.int64)
    finished = {
        "run_id": "0123456789abcdef", "study": study.name, "study_sha256": study.sha256, "attributes": ("topic",),
        "unit": unit, "epsilon": 8.0, "delta": 1e-4, "votes_per_unit": study.votes_per_unit,
        "selection": "simplex", "pool_size": len(pool), "corpus_size": int(texts_made.sum()),
        "dropped": {"duplicate": 4}, "samples": (), "seconds": {"census": 1.0}, "files": {},
        "software": {"flwr": "1.42.0"},
        "warnings": tuple(f"site {name} ({tiers[name]}): no answer in time" for name in silent),
        "sites": tuple(_site(study, name, tier, rounds, name in silent) for name, tier in tiers.items()),
        "codes": tuple(
            CodeSummary(
                label=f"topic={value}", values=(value,), profile=int(counts[code]) * len(answering),
                wanted=int(quotas[code]), candidates=per_code, votes=int(cast[pool.codes == code].sum()),
                chosen=max(int(texts_made[code]) - 1, 0), fresh=min(int(texts_made[code]), 1), repeated=0,
                made=int(texts_made[code]),
            )
            for code, value in enumerate(values)
        ),
        "rounds": tuple(
            RoundReport(
                round=r, signal_to_noise=0.3, shared=0.02,
                updates=tuple(
                    SiteUpdate(site=name, norm=float(2 / np.sqrt(r) + 0.3 * generator.random()), cosine=0.1)
                    for name, tier in answering.items()
                    if tier == "strong"
                ),
            )
            for r in range(1, rounds + 1)
        ),
    }  # fmt: skip
    write_summary(space, Summary.model_validate(finished | dict(summary or {})))
    return space


def hostile_run(folder: Path) -> Workspace:
    """A run whose texts, codes, sites, notes and versions are all hostile."""
    tricky = [plain(text).strip() for text in HOSTILE[:7]] + ["v" * 400]
    space = finished_run(folder, values=tricky, texts=HOSTILE, made=len(HOSTILE), wanted=len(HOSTILE))
    summary = Summary.model_validate_json(space.summary_json.read_text())
    site = summary.sites[0].model_copy(update={"name": HOSTILE[1], "outcome": HOSTILE[0]})
    changed = {
        "sites": (site, *summary.sites[1:]), "dropped": {HOSTILE[0]: 1}, "software": {HOSTILE[1]: HOSTILE[3]},
        "study": HOSTILE[2], "run_id": HOSTILE[7],
        # A lone surrogate can't be written as JSON.
        "warnings": tuple(text for text in HOSTILE if text.isprintable()),
    }  # fmt: skip
    space.summary_json.write_bytes(summary.model_copy(update=changed).model_dump_json().encode())
    return space


def _study(values: Sequence[str], per_code: int, rounds: int, unit: str, size: int) -> Study:
    raw = small_study(
        Path("/nowhere"),
        corpus={"size": size},
        pool={"size": max(24, len(values) * per_code)},
        training={"rounds": rounds},
        # Given, not solved, which would take most of a test's time; and enough for the promise.
        privacy={
            "unit": unit,
            "codes_per_unit": 2 if unit == "patient" else 1,
            "training_noise_multiplier": max(1.5, 0.5 * (2 * rounds) ** 0.5),
            "vote_noise_multiplier": 1.0,
        },
    )
    raw["codes"] = {"attributes": [{"name": "topic", "values": list(values)}]}
    return Study.model_validate(raw)


def _site(study: Study, name: str, tier: str, rounds: int, silent: bool) -> SiteSummary:
    plan = site_plan(study, tier, 20)
    answers = 0 if silent else rounds if tier == "strong" else 1
    return SiteSummary(
        name=name, tier=tier, size_class=20, answers=answers, outcome="no answer in time" if silent else "answered",
        epsilon=plan.epsilon, delta=plan.delta,
    )  # fmt: skip


def _each(given: int | Sequence[int], codes: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([given] * codes if isinstance(given, int) else given, dtype=np.int64)
