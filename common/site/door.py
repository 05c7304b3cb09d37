"""The one door: every byte that leaves a site and depends on its documents goes through `Door.release`.

    request -> policy -> ledger: seen before? -> the stored bytes again, no new charge
            -> reserve, durable -> compute -> store the noised bytes, durable -> reply

Why nothing leaks. The noise comes from the study and this site's own size class, never from the request. What
``compute`` gives back must be `Noised`, and only a noise mechanism makes those. A `Release` can be made here and
nowhere else, and a reply can be made only of a `Release`. Killed at any point, the site has charged the run at most
once, and what is asked again is answered with the same bytes, or, if nothing was stored, computed afresh: then nothing
had left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from common import protocol
from common.errors import FedcorpusError, LedgerError, PolicyRefusal, WireCode, WrongTierError
from common.privacy.accounting import PrivacyPlan
from common.privacy.values import Noised
from common.protocol import CensusReply, CensusRequest, Request, TrainRequest, VoteRequest
from common.site.check import check_libraries
from common.site.config import Site
from common.site.ledger import Ledger
from common.site.plan import site_plan
from common.site.policy import check_study
from common.study import Study

PROFILE = "profile"
VOTES = "votes"

_DOOR = object()
"""Held by this module alone: the right to make a `Release`."""

Compute = Callable[[PrivacyPlan, Sequence[str]], Mapping[str, Noised]]
"""Given the plan and the parts to compute, the noised arrays to release, by name."""


class Release:
    """Noised bytes that the ledger holds, on their way out."""

    __slots__ = ("_stored",)

    def __init__(self, stored: bytes, *, door: object) -> None:
        if door is not _DOOR:
            raise PolicyRefusal("Release: made outside the door; only Door.release makes one")
        self._stored = stored

    def to_records(self) -> Any:
        """The release as Flower records: the stored bytes, unchanged."""
        return protocol.release_records(self._stored)


class Door:
    """The door of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def census(self, request: CensusRequest) -> CensusReply:
        """Answer who this site is and whether it takes part. Depends on configuration only, never on documents."""
        return CensusReply(
            name=self._site.name,
            tier=self._site.tier,
            size_class=self._site.size_class,
            software=metadata.version("flwr"),
            study_sha256=request.study.sha256,
            refusal=self._objection(request),
        )

    def release(self, request: Request, compute: Compute) -> Release:
        """Answer a request that depends on documents.

        Parameters
        ----------
        request
            What is asked. Untrusted.
        compute
            Does the work and returns `Noised` arrays; called at most once, after the charge is durable.

        Raises
        ------
        PolicyRefusal, BudgetExceededError
            If this site doesn't allow it. Nothing was charged.
        LedgerError, ConflictError
            If the ledger can't be trusted or written, or knows the request with other content.
        """
        site, study = self._site, request.study
        check_study(site, study)
        plan = site_plan(study, site.tier, site.size_class)
        ledger = Ledger(site.ledger_path)
        try:
            with ledger.exclusive():
                seen = ledger.stored(study.sha256, request.run_id, request.key, request.digest)
                if seen is not None:
                    return Release(seen, door=_DOOR)
                planned = _planned_parts(site, study)
                parts = [p for p in _wanted_parts(request) if ledger.unspent(study.sha256, request.run_id, p)]
                _refuse_unplanned(site, request, parts, planned)
                ledger.reserve(study.sha256, request.run_id, site.tier, plan, planned, site.policy)
                stored = protocol.pack_release(_only_noised(compute(plan, parts)))
                ledger.store(study.sha256, request.run_id, request.key, request.digest, parts, stored)
                return Release(stored, door=_DOOR)
        finally:
            ledger.close()

    def _objection(self, request: CensusRequest) -> WireCode | None:
        try:
            check_libraries(self._site)
            check_study(self._site, request.study)
            site_plan(request.study, self._site.tier, self._site.size_class)
        except FedcorpusError as refusal:
            return refusal.wire_code
        return None


def _planned_parts(site: Site, study: Study) -> list[str]:
    """Everything a run may ever take from this site."""
    if site.tier == "weak":
        return [PROFILE, VOTES]
    return [PROFILE, *(f"train/{round_}" for round_ in range(1, study.training.rounds + 1))]


def _wanted_parts(request: Request) -> list[str]:
    """The parts that answer a request. The profile goes with a site's first answer; later ones find it spent."""
    if isinstance(request, TrainRequest):
        return [request.key, PROFILE]
    if isinstance(request, VoteRequest):
        return [VOTES, PROFILE]
    raise WrongTierError(f"door: {type(request).__name__} asks for nothing that is released")


def _refuse_unplanned(site: Site, request: Request, parts: Sequence[str], planned: Sequence[str]) -> None:
    if set(parts) <= set(planned):
        return
    raise WrongTierError(
        f"door: {request.key!r} asks a {site.tier!r} site for {list(parts)}; it releases {list(planned)}"
    )


def _only_noised(computed: Mapping[str, Noised]) -> dict[str, Any]:
    for name, value in computed.items():
        if not isinstance(value, Noised):
            raise LedgerError(f"door: {name!r} is a {type(value).__name__}; only Noised values are released")
    return {name: value.array for name, value in computed.items()}
