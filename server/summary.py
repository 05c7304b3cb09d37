"""The summary of a run: what was asked, what came, what it cost. For programs (JSON) and, rendered, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from common.errors import FedcorpusError
from common.privacy.accounting import PrivacyPlan
from common.site.plan import site_plan
from common.study import Study
from server.aggregate import sum_profiles
from server.corpus import check_corpus
from server.known_site import NOT_ASKED
from server.strategies.aggregation import RoundReport
from server.workspace import Workspace

if TYPE_CHECKING:
    # Types only: a summary is read and shown without loading torch.
    from common.protocol import CandidatePool
    from server.assembly import AssembledCorpus
    from server.census import Roster, SiteRecord
    from server.generation import Drops
    from server.progress import Progress
    from server.strategies.profile_and_vote import Ballots

SAMPLES = 5


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SiteSummary(_Frozen):
    """One site."""

    name: str = Field(description="Name of the site.")
    tier: str = Field(description="strong or weak.")
    size_class: int = Field(description="Declared public lower bound on its units.")
    answers: int = Field(description="Valid answers it gave: one per training round, or one ballot.")
    outcome: str = Field(description="How its last request ended.")
    epsilon: float | None = Field(description="Joint epsilon of everything the study asks of it; null if not asked.")
    delta: float | None = Field(description="Joint delta of the same; null if not asked.")


class CodeSummary(_Frozen):
    """One control code."""

    label: str = Field(description="The code in words.")
    values: tuple[str, ...] = Field(description="Its value of each attribute.")
    profile: int = Field(description="Sum of the noisy profiles; may be negative.")
    size: int | None = Field(
        default=None, description="Its units as profiles and votes together tell them, which quotas go by."
    )
    wanted: int = Field(description="Quota in the corpus.")
    candidates: int = Field(description="Candidates in the pool.")
    votes: int = Field(description="Sum of the noisy votes on its candidates.")
    chosen: int = Field(description="Candidates in the corpus.")
    fresh: int = Field(description="Texts generated after the vote.")
    repeated: int = Field(description="Texts that had to be repeated.")
    made: int = Field(description="Texts in the corpus.")


class Sample(_Frozen):
    """A text of the corpus."""

    label: str = Field(description="Its code in words.")
    text: str = Field(description="The text.")


class Summary(_Frozen):
    """A finished run."""

    run_id: str = Field(description="Name of the run.")
    study: str = Field(description="Name of the study.")
    study_sha256: str = Field(description="Hash of the study.")
    attributes: tuple[str, ...] = Field(description="Names of the attributes that make the control codes.")
    unit: str = Field(description="Privacy unit; adjacency is add/remove one unit.")
    epsilon: float = Field(
        description="Largest joint epsilon of a site; holds for a person whose documents are at one site."
    )
    delta: float = Field(description="Largest joint delta of a site.")
    votes_per_unit: int = Field(description="R, most votes per unit.")
    selection: str = Field(description="Selection rule.")
    sites: tuple[SiteSummary, ...] = Field(description="All sites that were heard of.")
    codes: tuple[CodeSummary, ...] = Field(description="All control codes.")
    pool_size: int = Field(description="Candidates that were voted on.")
    corpus_size: int = Field(description="Texts in the corpus.")
    dropped: Mapping[str, int] = Field(description="Generated texts that weren't kept, by reason.")
    rounds: tuple[RoundReport, ...] = Field(description="What the updates of each training round say.")
    samples: tuple[Sample, ...] = Field(description="A few texts, spread over the codes.")
    seconds: Mapping[str, float] = Field(description="Duration of each phase.")
    files: Mapping[str, str] = Field(description="Where the artefacts are.")
    software: Mapping[str, str] = Field(description="Versions.")
    warnings: tuple[str, ...] = Field(description="What a reader must know.")


def summarise(
    workspace: Workspace,
    study: Study,
    run_id: str,
    roster: Roster,
    pool: CandidatePool,
    votes: Ballots,
    corpus: AssembledCorpus,
    drops: Drops,
    rounds: Sequence[RoundReport],
    progress: Progress,
) -> Summary:
    """Build the summary of a finished run."""
    sites = tuple(_site(study, site) for site in roster.all)
    return Summary(
        run_id=run_id,
        study=study.name,
        study_sha256=study.sha256,
        attributes=study.codes.names,
        unit=study.privacy.unit,
        epsilon=max((site.epsilon for site in sites if site.epsilon is not None), default=0.0),
        delta=max((site.delta for site in sites if site.delta is not None), default=0.0),
        votes_per_unit=study.votes_per_unit,
        selection=study.corpus.selection if votes.ballots else "uniform",
        sites=sites,
        codes=_codes(study, pool, votes, corpus),
        pool_size=len(pool),
        corpus_size=len(corpus.texts),
        dropped=dict(drops.counts),
        rounds=tuple(rounds),
        samples=_samples(study, corpus),
        seconds=dict(progress.seconds),
        files={
            "corpus": str(workspace.corpus_parquet),
            "corpus as JSON lines": str(workspace.corpus_jsonl),
            "adapter": str(workspace.adapter),
            "summary": str(workspace.summary_text),
        },
        software={name: metadata.version(name) for name in ("flwr", "torch", "transformers", "peft", "dp-accounting")},
        warnings=_warnings(study, roster, corpus),
    )


def read_summary(workspace: Workspace) -> Summary:
    """Read ``summary.json``."""
    return Summary.model_validate_json(workspace.summary_json.read_text(encoding="utf-8"))


def _site(study: Study, site: SiteRecord) -> SiteSummary:
    plan = _plan_of(study, site)
    return SiteSummary(
        name=site.name,
        tier=site.tier,
        size_class=site.size_class,
        answers=site.answers,
        outcome=site.outcome,
        epsilon=None if plan is None else plan.epsilon,
        delta=None if plan is None else plan.delta,
    )


def _plan_of(study: Study, site: SiteRecord) -> PrivacyPlan | None:
    """What a site that was asked has charged at most; None if it wasn't, or refused."""
    untouched = not site.answers and (site.outcome == NOT_ASKED or site.outcome.startswith("refused"))
    if untouched or site.tier not in ("strong", "weak"):
        return None
    try:
        return site_plan(study, site.tier, site.size_class)
    except FedcorpusError:
        return None


def _codes(study: Study, pool: CandidatePool, votes: Ballots, corpus: AssembledCorpus) -> tuple[CodeSummary, ...]:
    cast = sum_profiles([np.zeros(len(pool), dtype=np.int64), *votes.ballots.values()])
    per_origin = {
        origin: np.bincount([t.code for t in corpus.texts if t.origin == origin], minlength=len(study.codes))
        for origin in ("candidate", "top-up", "repeat")
    }
    made = check_corpus(corpus.texts, corpus.wanted)
    return tuple(
        CodeSummary(
            label=study.codes.label(code),
            values=study.codes.combinations[code],
            profile=int(corpus.profile[code]),
            size=int(corpus.sizes[code]),
            wanted=int(corpus.wanted[code]),
            candidates=int(np.count_nonzero(pool.codes == code)),
            votes=int(cast[pool.codes == code].sum()),
            chosen=int(per_origin["candidate"][code]),
            fresh=int(per_origin["top-up"][code]),
            repeated=int(per_origin["repeat"][code]),
            made=int(made[code]),
        )
        for code in range(len(study.codes))
    )


def _samples(study: Study, corpus: AssembledCorpus) -> tuple[Sample, ...]:
    """Texts from the codes with the largest quotas, one each; then more of them if there are few codes."""
    by_code: dict[int, list[str]] = {}
    for text in corpus.texts:
        by_code.setdefault(text.code, []).append(text.text)
    largest = sorted(by_code, key=lambda code: (-int(corpus.wanted[code]), code))
    in_turn = [(code, texts[turn]) for turn in range(SAMPLES) for code in largest if turn < len(texts := by_code[code])]
    return tuple(Sample(label=study.codes.label(code), text=text) for code, text in in_turn[:SAMPLES])


def _warnings(study: Study, roster: Roster, corpus: AssembledCorpus) -> tuple[str, ...]:
    missing = [f"site {site.name} ({site.tier}): {site.outcome}" for site in roster.all if site.outcome != "answered"]
    holes = [
        f"code {study.codes.label(code)}: {count} texts are missing, the generator gave none"
        for code, count in enumerate(corpus.holes)
        if count
    ]
    return (*missing, *holes)


def phases(seconds: Mapping[str, float], names: Sequence[str]) -> str:
    """Durations in words."""
    return ", ".join(f"{name} {seconds[name]:.0f} s" for name in names if name in seconds)
