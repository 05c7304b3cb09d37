"""The one door: every byte that leaves a site and depends on its documents goes through `Door.release`.

    request -> policy -> is this ledger the newest copy? -> seen before? -> the stored bytes again, no new charge
            -> prepare -> reserve, durable -> compute -> store the noised bytes, durable -> reply

Why nothing leaks. The noise comes from the study and this site's own size class, never from the request. What is
computed must be `Noised`, and only a noise mechanism makes those. A `Release` can be made here and nowhere else, and a
reply can be made only of a `Release`. Killed at any point, the site has charged the run at most once, and what is asked
again is answered with the same bytes, or, if nothing was stored, computed afresh: then nothing had left. Whatever can
go wrong in reading documents and models goes wrong in ``prepare``, before anything is charged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from common import protocol
from common.errors import (
    AwaitingApprovalError,
    FedcorpusError,
    LedgerError,
    PolicyRefusal,
    WireCode,
    WrongTierError,
)
from common.privacy.accounting import PrivacyPlan
from common.privacy.values import Noised
from common.protocol import CensusReply, CensusRequest, LedgerHead, Request, TrainRequest, VoteRequest
from common.site.check import check_libraries
from common.site.config import Site
from common.site.ledger import Ledger
from common.site.policy import check_lifetime, check_request, check_study
from common.study import Study

log = logging.getLogger("fedcorpus.site")

PROFILE = "profile"
VOTES = "votes"

_DOOR = object()
"""Held by this module alone: the right to make a `Release`."""

Compute = Callable[[PrivacyPlan, Sequence[str]], Mapping[str, Noised]]
"""Given the plan and the parts to compute, the noised arrays to release, by name."""

Prepare = Callable[[], Compute]
"""Reads what computing needs: documents, models. Nothing is charged yet, so it may fail for free."""


class Release:
    """Noised bytes that the ledger holds, on their way out."""

    __slots__ = ("_head", "_stored")

    def __init__(self, stored: bytes, head: LedgerHead, *, door: object) -> None:
        if door is not _DOOR:
            raise PolicyRefusal("Release: made outside the door; only Door.release makes one")
        self._stored, self._head = stored, head

    def to_records(self) -> Any:
        """The release as Flower records: the stored bytes, unchanged, and the head of the ledger."""
        return protocol.release_records(self._stored, self._head)


class Door:
    """The door of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def census(self, request: CensusRequest) -> CensusReply:
        """Answer who this site is and whether it takes part. Depends on settings and ledger, never on documents."""
        refusal, head = self._objection(request)
        return CensusReply(
            name=self._site.name,
            tier=self._site.tier,
            size_class=self._site.size_class,
            software=metadata.version("flwr"),
            study_sha256=request.study.sha256,
            refusal=refusal,
            ledger=head,
        )

    def release(self, request: Request, prepare: Prepare) -> Release:
        """Answer a request that depends on documents.

        Parameters
        ----------
        request
            What is asked. Untrusted.
        prepare
            Reads what is needed and returns what computes `Noised` arrays. Each is called at most once; the latter
            after the charge is durable.

        Raises
        ------
        PolicyRefusal, BudgetExceededError
            If this site doesn't allow it. Nothing was charged.
        LedgerError, ConflictError
            If the ledger can't be trusted or written, or knows the request with other content.
        """
        site, study, run, key = self._site, request.study, request.run_id, request.key
        planned = _planned_parts(site, study)
        wanted = _wanted_parts(request)
        _refuse_unplanned(site, request, wanted, planned)
        plan = check_study(site, study)
        check_request(site, request)
        with Ledger.of(site) as ledger, ledger.exclusive():
            ledger.check_not_restored(request.seen)
            stored = ledger.stored(site.name, study.sha256, run, key, request.digest)
            if stored is None:
                self._require_approval(ledger, study)
                self._require_budget(ledger, study, run, plan)
                compute = prepare()
                ledger.reserve(site, study, run, plan, planned)
                parts = ledger.unspent(site.name, study.sha256, run, wanted)
                stored = protocol.pack_release(_only_noised(compute(plan, parts)))
                ledger.store(site.name, study.sha256, run, key, request.digest, parts, stored)
            return Release(stored, ledger.head(), door=_DOOR)

    def _objection(self, request: CensusRequest) -> tuple[WireCode | None, LedgerHead | None]:
        """Why this site wouldn't answer, if it wouldn't; all that can be told without reading a document."""
        head = None
        try:
            check_libraries(self._site)
            with Ledger.of(self._site) as ledger:
                head = ledger.head()
                ledger.check_not_restored(request.seen)
                plan = check_study(self._site, request.study)
                self._require_approval(ledger, request.study)
                self._require_budget(ledger, request.study, request.run_id, plan)
            return None, head
        except FedcorpusError as refusal:
            code, said = refusal.wire_code, str(refusal)
        # Not above, where a log that can't be written would print what led to the refusal.
        log.warning("study %s refused: %s", request.study.name, said)
        return code, head

    def _require_approval(self, ledger: Ledger, study: Study) -> None:
        if self._site.policy.allowed_studies != "ask" or ledger.verdict(self._site.name, study.sha256) == "approved":
            return
        ledger.ask(self._site.name, study)
        raise AwaitingApprovalError(
            f"study {study.name!r} waits for a person: 'fedcorpus site pending', then 'fedcorpus site approve' or "
            f"'decline' with {study.sha256[:12]}"
        )

    def _require_budget(self, ledger: Ledger, study: Study, run: str, plan: PrivacyPlan) -> None:
        # Asked again by `reserve` within its transaction, which decides; here it saves the work of preparing.
        if ledger.reservation(self._site.name, study.sha256, run) is None:
            check_lifetime(self._site.policy, ledger.charges(self._site.documents.assets), plan)


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
