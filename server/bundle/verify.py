"""Verification of a bundle by anybody: is it what was signed, is it one piece, and does its privacy claim hold?

Nothing in it is believed. In this order, and as far as the last sound step:

1. The manifest lists every file, and every file is as listed; the signature is of the manifest, by the key that is
   trusted, if one is given (`server.bundle.seal`). Without, a forger could have signed with a key of his own, and that
   is what is said.
2. The privacy statement is the one that the study gives; epsilon of its mechanisms is computed anew by the second
   accountant. The words are those of the statement.
3. Both formats hold the same rows, of codes that the study declares (`server.bundle.rows`).
4. The card and the Croissant metadata, made anew of all that, are the same bytes: neither promises anything else.
5. If ledgers are given: as many sites of each tier as the statement counts have one, each charges what the study asks
   for, and by the second accountant costs at most what is claimed (`server.verify`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field

from common.errors import FedcorpusError
from common.study import Study
from server.bundle import files
from server.bundle.card import card
from server.bundle.croissant import croissant
from server.bundle.files import Facts
from server.bundle.rows import ExpectedRows, FoundRows, check_rows
from server.bundle.seal import Problem, Seal, Signature, check_seal, content_of, digest_of, parsed
from server.statement import PrivacyStatement, TierStatement, privacy_statement, second_epsilon, to_text
from server.summary import Sample, SiteSummary
from server.verify import TOLERANCE, Claim, Export, SiteVerdict, at_most_about, site_verdict

_ModelT = TypeVar("_ModelT", bound=BaseModel)


class TierVerdict(BaseModel):
    """A tier's claim, and what the second accountant says of the mechanisms stated for it."""

    model_config = ConfigDict(frozen=True)

    tier: str = Field(description="strong or weak.")
    sites: int = Field(description="Sites that have a part in the corpus.")
    claimed: float = Field(description="Epsilon that the statement claims.")
    delta: float = Field(description="Delta that it claims.")
    second: float | None = Field(description="Epsilon by the second accountant; null if it can't be computed.")


class BundleVerification(BaseModel):
    """Whether a bundle is sound and its claim holds."""

    model_config = ConfigDict(frozen=True)

    title: str = Field(description="Title of the data set; empty if it can't be read.")
    signature: Signature = Field(description="Whose signature it bears.")
    signing_key: str = Field(description="Fingerprint of the key that signed; empty if none did.")
    texts: int = Field(description="Texts in the corpus.")
    unit: str = Field(description="Privacy unit; adjacency is add or remove one.")
    claimed_epsilon: float | None = Field(description="Epsilon that the corpus claims.")
    claimed_delta: float | None = Field(description="Delta that it claims.")
    tiers: tuple[TierVerdict, ...] = Field(description="By the study alone.")
    sites: tuple[SiteVerdict, ...] = Field(description="By the ledgers that were given.")
    problems: tuple[str, ...] = Field(description="What isn't as it should be.")
    holds: bool = Field(description="Whether there are none.")


@dataclass(frozen=True)
class _Contents:
    """A bundle's files, read."""

    study: Study
    facts: Facts
    statement: PrivacyStatement


def is_bundle(folder: Path) -> bool:
    """Whether a folder is meant to be a bundle, and not a run's."""
    return any((folder / name).exists() for name in (files.MANIFEST, files.STATEMENT, files.FACTS))


def verify_bundle(
    folder: Path, exports: Sequence[Export] = (), trusted: Ed25519PublicKey | None = None
) -> BundleVerification:
    """Check a bundle; whatever is in it, this returns.

    Parameters
    ----------
    exports
        Ledgers that the sites exported; all of them or none.
    trusted
        The publisher's key, from another source than the bundle.
    """
    seal = check_seal(folder, trusted)
    if seal.problems:
        return _found(seal, seal.problems)
    try:
        contents = _read(folder)
    except Problem as problem:
        return _found(seal, (str(problem),))
    tiers: tuple[TierVerdict, ...] = ()
    sites: tuple[SiteVerdict, ...] = ()
    try:
        _check_statement(contents)
        # Not before: the numbers are the study's now, so no forger chooses what is computed here.
        tiers = tuple(map(_tier_verdict, contents.statement.tiers))
        sites = _site_verdicts(contents, exports) if exports else ()
        problems = [
            *_check_signer(contents, seal),
            *_check_tiers(tiers),
            *(_check_ledgers(contents.statement, sites) if exports else []),
            *_check_pages(folder, contents),
        ]
    except Problem as problem:
        problems = [str(problem)]
    return _found(seal, problems, contents, tiers, sites)


def _found(
    seal: Seal,
    problems: Sequence[str],
    contents: _Contents | None = None,
    tiers: tuple[TierVerdict, ...] = (),
    sites: tuple[SiteVerdict, ...] = (),
) -> BundleVerification:
    return BundleVerification(
        title=contents.facts.title if contents else "",
        signature=seal.signature,
        signing_key=seal.signing_key,
        texts=contents.facts.texts if contents else 0,
        unit=contents.statement.unit if contents else "",
        claimed_epsilon=contents.statement.epsilon if contents else None,
        claimed_delta=contents.statement.delta if contents else None,
        tiers=tiers,
        sites=sites,
        problems=tuple(problems),
        holds=not problems,
    )


def _read(folder: Path) -> _Contents:
    canonical = content_of(folder, files.STUDY)
    study = parsed(files.STUDY, lambda: Study.from_canonical(canonical.decode("utf-8")))
    facts = _model(folder, files.FACTS, Facts)
    statement = _model(folder, files.STATEMENT, PrivacyStatement)
    found, _ = files.found_files(folder)
    wanted = files.listed_files(facts.shards, facts.signing_key is not None)
    if found - {files.MANIFEST, files.SIGNATURE} != wanted:
        odd = sorted((found - {files.MANIFEST, files.SIGNATURE}) ^ wanted)
        raise Problem(f"a bundle of {facts.shards} shards has other files: {', '.join(odd[:5])}")
    # Of the file as it was written: a later version of this program may know more options.
    digest = hashlib.sha256(canonical).hexdigest()
    for name, content in ((files.FACTS, facts), (files.STATEMENT, statement)):
        if content.study_sha256 != digest:
            raise Problem(f"{name} is of another study than {files.STUDY}")
    if facts.run_id != statement.run_id:
        raise Problem(f"{files.FACTS} is of another run than {files.STATEMENT}")
    return _Contents(study, facts, statement)


def _check_statement(contents: _Contents) -> None:
    statement = contents.statement
    counted = {tier.tier: tier.sites for tier in statement.tiers}
    try:
        expected = privacy_statement(
            contents.study, statement.study_sha256, statement.run_id, counted, statement.accountant
        )
    except (FedcorpusError, ValueError, ArithmeticError, MemoryError) as cause:
        raise Problem(f"{files.STUDY} gives no privacy statement ({type(cause).__name__})") from cause
    difference = _difference(statement.model_dump(mode="json"), expected.model_dump(mode="json"))
    if difference:
        raise Problem(f"{files.STATEMENT}: {difference} isn't what the study gives")


def _tier_verdict(tier: TierStatement) -> TierVerdict:
    try:
        second = second_epsilon(tier)
    except FedcorpusError:
        second = None
    return TierVerdict(tier=tier.tier, sites=tier.sites, claimed=tier.epsilon, delta=tier.delta, second=second)


def _check_signer(contents: _Contents, seal: Seal) -> list[str]:
    if (contents.facts.signing_key or "") == seal.signing_key:
        return []
    return [f"{files.FACTS} names another key than the one that signed"]


def _check_tiers(tiers: Sequence[TierVerdict]) -> list[str]:
    problems = []
    for tier in tiers:
        if tier.second is None or tier.second > at_most_about(tier.claimed):
            found = "gives none" if tier.second is None else f"gives {tier.second:.4f}"
            problems.append(f"the {tier.tier} tier claims epsilon {tier.claimed:g}; the second accountant {found}")
    return problems


def _check_pages(folder: Path, contents: _Contents) -> list[str]:
    """The texts, and every page that is made of them, of the study and of the facts."""
    facts, statement, study = contents.facts, contents.statement, contents.study
    if facts.columns != files.columns(study.codes):
        return [f"{files.FACTS} names other columns than the study's {', '.join(files.columns(study.codes))}"]
    shards = files.shard_names(facts.shards)
    values = tuple(frozenset(attribute.values) for attribute in study.codes.attributes)
    rows = check_rows(folder, ExpectedRows(shards=shards, columns=facts.columns, values=values, texts=facts.texts))
    if rows.problem:
        return [rows.problem]
    digests = {name: digest_of(folder, name) for name in (*shards, files.JSON_LINES)}
    pages = {
        files.WORDS: f"# Privacy statement\n\n{to_text(statement)}",
        files.CROISSANT: croissant(facts, statement, digests),
        files.CARD: _card(contents, rows),
    }
    return [
        f"{name} isn't the one of these texts and of {files.STATEMENT}"
        for name, page in pages.items()
        if content_of(folder, name) != page.encode()
    ]


def _card(contents: _Contents, rows: FoundRows) -> str:
    codes = contents.study.codes
    counts, samples = [0] * len(codes), []
    for values, count in rows.counts:
        index = codes.index(values)
        if index is not None:
            counts[index] = count
    for values, text in rows.samples:
        index = codes.index(values)
        if index is not None:
            samples.append(Sample(label=codes.label(index), text=text))
    return card(contents.facts, contents.statement, contents.study, counts, samples)


def _site_verdicts(contents: _Contents, exports: Sequence[Export]) -> tuple[SiteVerdict, ...]:
    """Of every site that a ledger charges for this run; who took part, the bundle doesn't say."""
    statement = contents.statement
    claim = Claim(
        contents.study, statement.study_sha256, statement.run_id, statement.unit, statement.epsilon, statement.delta
    )
    run = {"study": statement.study_sha256, "run": statement.run_id}
    charged: dict[str, Mapping[str, Any]] = {}
    for export in exports:
        for event in export.events:
            if event.kind == "reservation" and run.items() <= event.content.items():
                charged[str(event.content.get("site"))] = event.content
    return tuple(site_verdict(claim, _as_summary(name, charge, claim), exports) for name, charge in charged.items())


def _as_summary(name: str, charge: Mapping[str, Any], claim: Claim) -> SiteSummary:
    size = charge.get("size_class")
    return SiteSummary(
        name=name,
        tier=str(charge.get("tier")),
        size_class=size if isinstance(size, int) else 0,
        answers=0,
        outcome="",
        epsilon=claim.epsilon,
        delta=claim.delta,
    )


def _check_ledgers(statement: PrivacyStatement, sites: Sequence[SiteVerdict]) -> list[str]:
    problems = [f"site {site.site}: {site.problem}" for site in sites if site.problem]
    for tier in statement.tiers:
        answered = sum(site.tier == tier.tier and site.releases > 0 for site in sites)
        if answered < tier.sites:
            problems.append(
                f"{tier.sites} {tier.tier} sites have a part in the corpus; the ledgers that were given show {answered}"
            )
    return problems


def _difference(this: Any, that: Any, place: str = "") -> str:
    """Where two values differ, or ''; numbers may differ as two versions of a solver do."""
    if isinstance(this, dict) and isinstance(that, dict) and this.keys() == that.keys():
        return next((found for key in that if (found := _difference(this[key], that[key], f"{place}.{key}"))), "")
    if isinstance(this, list) and isinstance(that, list) and len(this) == len(that):
        pairs = enumerate(zip(this, that, strict=True))
        return next((found for n, (a, b) in pairs if (found := _difference(a, b, f"{place}[{n}]"))), "")
    if isinstance(this, float) and isinstance(that, float) and math.isclose(this, that, rel_tol=TOLERANCE):
        return ""
    return "" if type(this) is type(that) and this == that else place.removeprefix(".")


def _model(folder: Path, name: str, model: type[_ModelT]) -> _ModelT:
    content = content_of(folder, name)
    return parsed(name, lambda: model.model_validate_json(content))
