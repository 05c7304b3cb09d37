"""The privacy statement of a corpus: what is promised to whom, by which mechanisms, and what isn't, in JSON and words.

It is made from the study, which was fixed before any data was touched, and from how many sites of each tier have a part
in the corpus. So whoever has the study can recompute it, and nothing in it belongs to one site: no name, no size class,
no noisy count. The price is that it states an upper bound over all sites that the study admits, not what these came to.

Why it is an upper bound. Where the study promises an epsilon, every site solves its noise for it, whatever its size
class. Where the study gives the noise instead, a site of the smallest size class has the highest sample rate, and
epsilon and delta rise with it. What is stated is rounded up only.

    statement = privacy_statement(study, study.sha256, run_id, {"strong": 2, "weak": 3}, accountant("0.6.0"))
    statement.epsilon, statement.delta
    to_text(statement)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.errors import PrivacyError
from common.privacy import second_opinion
from common.privacy.accounting import VERIFY_INTERVAL, describe
from common.site.plan import site_plan
from common.study import Study
from server.markdown import code, escaped
from server.report import at_most

VERSION = 1
"""Of the fields, of how they are made and of the words: a change of one of them is a new version."""

Tier = Literal["strong", "weak"]
TIERS: tuple[Tier, ...] = ("strong", "weak")

_RELEASES = {"strong": ("training", "profile"), "weak": ("votes", "profile")}
"""In the order of a plan's mechanisms."""

_UNITS = {
    "record": "one document of a site, with its control code or codes",
    "patient": "all that one site holds of one patient, however many documents that is",
}

ASSUMPTION = (
    "The guarantee holds for a person whose documents are at one site. Nobody checks that, since sites don't compare "
    "whom they treat. For a person whose documents are at several sites the guarantees of these sites add up."
)

NOT_COVERED = (
    "What the language model knew before: it was trained on other text by others, and repeats of that text in the "
    "corpus are outside this guarantee.",
    "Other releases about the same people: other studies, statistics or texts of the same sites cost privacy of "
    "their own, which adds to this one.",
    "What is true of a group: that many patients of a kind complain of something can be learnt with or without any one "
    "of them, and may still be held against them.",
    "Public facts: the study, its control codes, how many sites took part and what may be known about them otherwise.",
    "Whether the data might be used: legal grounds, consent, ethics and governance are no matter of differential "
    "privacy.",
    "Whether the texts are true: they were made up by a language model. A name in them may be somebody's by chance.",
    "Sites that ran something else than this program. A ledger shows what a site says that it did.",
)

_RECORDS = (
    "The unit is a document, not a person: for a person with k documents at a site, epsilon is k times as large, and "
    "delta up to k e^((k-1) epsilon) times."
)

_SIX_DIGITS = Context(prec=6, rounding=ROUND_CEILING)
"""As many as are printed of a delta; a promise may not look better than it is."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Release(_Frozen):
    """One kind of release of a site."""

    release: Literal["training", "profile", "votes"] = Field(description="What the site gives.")
    mechanism: dict[str, Any] = Field(description="The mechanism with its parameters, as a ledger writes it.")


class TierStatement(_Frozen):
    """What a site of a tier promises."""

    tier: Tier = Field(description="strong: trains. weak: profiles and votes.")
    sites: int = Field(ge=1, description="Sites of the tier that have a part in the corpus.")
    epsilon: float = Field(ge=0, description="Joint epsilon of all releases of a site, rounded up.")
    delta: float = Field(gt=0, lt=1, description="Joint delta of the same.")
    size_class: int = Field(
        description="Size class that the mechanisms are stated for: the smallest that the study admits. A larger site "
        "samples at a lower rate."
    )
    releases: tuple[Release, ...] = Field(description="What a site gives, all composed.")


class AtSeveralSites(_Frozen):
    """What a person is promised whose documents are at several sites."""

    sites: int = Field(ge=2, description="Number of sites.")
    epsilon: float = Field(ge=0, description="So many times the largest epsilon of a site.")
    delta: float = Field(gt=0, le=1, description="So many times the largest delta of a site, at most 1.")


class PrivacyStatement(_Frozen):
    """The statement (``privacy_statement.json``)."""

    format: Literal["fedcorpus privacy statement"] = Field(description="What this file is.")
    version: Literal[1] = Field(description="Version of the format.")
    study: str = Field(description="Name of the study.")
    study_sha256: str = Field(description="SHA-256 of the study in canonical JSON.")
    run_id: str = Field(description="Name of the run, by which the sites' ledgers know it.")
    unit: Literal["record", "patient"] = Field(description="Privacy unit.")
    unit_means: str = Field(description="The unit in words.")
    adjacency: Literal["add or remove one unit"] = Field(description="When two data sets are neighbours.")
    epsilon: float = Field(ge=0, description="Epsilon of the corpus: the largest of a tier.")
    delta: float = Field(gt=0, lt=1, description="Delta of the corpus: the largest of a tier.")
    tiers: tuple[TierStatement, ...] = Field(min_length=1, description="The tiers that have a part in the corpus.")
    max_grad_norm: float = Field(description="C: the noise of training is in multiples of it.")
    composition: Literal["joint", "paper"] = Field(
        description="joint: a site's releases are composed as one privacy loss distribution. paper: epsilon and delta "
        "are split and added."
    )
    accountant: str = Field(description="What computed the noise, with its version.")
    assumption: str = Field(description="What is taken for granted about people at several sites.")
    several_sites: tuple[AtSeveralSites, ...] = Field(description="What holds where it isn't so.")
    not_covered: tuple[str, ...] = Field(description="What the guarantee says nothing about.")


def privacy_statement(
    study: Study, study_sha256: str, run_id: str, sites: Mapping[Tier, int], accountant: str
) -> PrivacyStatement:
    """The statement of a run's corpus.

    Parameters
    ----------
    study_sha256
        Hash that the run knew the study by; a later version of this program may write it otherwise.
    sites
        Tier -> number of its sites that answered at least once; tiers of none may be left out.
    accountant
        What `accountant` says of the version that the run used.

    Raises
    ------
    PrivacyError
        If no site has a part in the corpus, or the study admits a site without a finite epsilon.
    """
    tiers = tuple(_tier(study, tier, sites[tier]) for tier in TIERS if sites.get(tier))
    if not tiers:
        raise PrivacyError("privacy statement: no site has a part in this corpus; at least one is needed")
    epsilon, delta = max(tier.epsilon for tier in tiers), max(tier.delta for tier in tiers)
    unit = study.privacy.unit
    return PrivacyStatement(
        format="fedcorpus privacy statement",
        version=VERSION,
        study=study.name,
        study_sha256=study_sha256,
        run_id=run_id,
        unit=unit,
        unit_means=_UNITS[unit],
        adjacency="add or remove one unit",
        epsilon=epsilon,
        delta=delta,
        tiers=tiers,
        max_grad_norm=study.privacy.max_grad_norm,
        composition=study.privacy.accounting,
        accountant=accountant,
        assumption=ASSUMPTION,
        several_sites=tuple(
            AtSeveralSites(sites=m, epsilon=_up(m * epsilon), delta=_delta(delta, times=m))
            for m in sorted({2, sum(tier.sites for tier in tiers)} - {1})
            if m <= sum(tier.sites for tier in tiers)
        ),
        not_covered=(*NOT_COVERED, _RECORDS) if unit == "record" else NOT_COVERED,
    )


def second_epsilon(tier: TierStatement) -> float:
    """Epsilon of what a site of the tier gives, by the second accountant, at the delta that is stated.

    Raises
    ------
    PrivacyError
        If the second accountant can't say.
    """
    return second_opinion.epsilon([release.mechanism for release in tier.releases], tier.delta)


def accountant(version: str) -> str:
    """The first accountant in words, for a version of dp-accounting."""
    return f"dp-accounting {version} PLD, interval {VERIFY_INTERVAL:g}"


def to_text(statement: PrivacyStatement) -> str:
    """The statement in plain words: Markdown without headings, the same for the same statement."""
    promise = f"(ε={at_most(statement.epsilon)}, δ={statement.delta:g})"
    return "\n".join(
        [
            f"This corpus is {promise}-differentially private. The unit is the {statement.unit}: "
            f"{statement.unit_means}. Two data sets are neighbours if one has one unit more. Whatever one asks of this "
            f"corpus, the probability of an answer is at most e^ε = {_factor(statement.epsilon)} times what it is "
            "without that unit, plus δ, and the other way round. This holds for everything that these sites released "
            "in this run, so also for the corpus, for every part of it and for anything that is ever made of it.",
            "",
            "Each site adds the noise itself, before anything leaves it, and counts the cost in a ledger of its own. "
            "All that one site gave:",
            "",
            *(line for tier in statement.tiers for line in _tier_lines(tier, statement)),
            "",
            f"The largest of these is the corpus' guarantee. {_composition(statement)} Computed with "
            f"{escaped(statement.accountant)}; checked with a second accountant that shares no code with it.",
            "",
            statement.assumption,
            *(f"Of {s.sites} sites: (ε={at_most(s.epsilon)}, δ={s.delta:g}) at most." for s in statement.several_sites),
            "",
            "The guarantee does not cover:",
            "",
            *(f"- {line}" for line in statement.not_covered),
            "",
            f"Study `{code(statement.study_sha256)}`, run `{code(statement.run_id)}`.",
            "",
        ]
    )


def _tier(study: Study, tier: Tier, sites: int) -> TierStatement:
    smallest = study.federation.min_documents
    plan = site_plan(study, tier, smallest)
    return TierStatement(
        tier=tier,
        sites=sites,
        epsilon=_up(study.privacy.epsilon or plan.epsilon),
        delta=_delta(study.privacy.delta or plan.delta),
        size_class=smallest,
        releases=tuple(
            Release.model_validate({"release": release, "mechanism": describe(mechanism)})
            for release, mechanism in zip(_RELEASES[tier], plan.mechanisms, strict=True)
        ),
    )


def _up(epsilon: float) -> float:
    if not math.isfinite(epsilon):
        raise PrivacyError(f"privacy statement: epsilon is {epsilon}; a finite one is needed")
    return float(at_most(epsilon))


def _delta(delta: float, times: int = 1) -> float:
    # In decimals: three times 0.0001 is a little more than 0.0003 as a float, and would be rounded up.
    return min(1.0, float(_SIX_DIGITS.create_decimal(times * Decimal(repr(float(delta))))))


def _tier_lines(tier: TierStatement, statement: PrivacyStatement) -> list[str]:
    many = "site" if tier.sites == 1 else "sites"
    return [
        f"- {tier.sites} {tier.tier} {many}, each (ε={at_most(tier.epsilon)}, δ={tier.delta:g}), for a site of the "
        f"smallest size class that the study admits ({tier.size_class} units):",
        *(f"  - {_in_words(release, statement)}" for release in tier.releases),
    ]


def _in_words(release: Release, statement: PrivacyStatement) -> str:
    values = release.mechanism
    if release.release == "training":
        return (
            f"training: {values['steps']} steps. In each a unit takes part with probability "
            f"{values['sample_rate']:.4g}; its gradient is clipped to the norm C={statement.max_grad_norm:g}, and "
            f"Gaussian noise of standard deviation {values['noise_multiplier']:.4f} C is added to the sum."
        )
    what = {
        "profile": "profile, once: the number of units under each control code, where a unit counts under at most "
        f"{values['cells_per_unit']}",
        "votes": "votes, once: the number of votes for each candidate text, of which a unit casts at most "
        f"{values['cells_per_unit']}",
    }[release.release]
    return f"{what}, plus discrete Gaussian noise of scale {values['scale']:.3f}."


def _composition(statement: PrivacyStatement) -> str:
    if statement.composition == "joint":
        return "A site's releases are composed all at once, as one privacy loss distribution."
    return "A site's releases are accounted one by one; their epsilons and deltas are added."


def _factor(epsilon: float) -> str:
    """e^epsilon, rounded up."""
    factor = math.exp(min(epsilon, 700.0))
    return f"{math.ceil(factor * 100) / 100:g}" if factor < 100 else f"{math.ceil(factor):,}"
