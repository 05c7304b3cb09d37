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
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from numpy.typing import NDArray

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
from common.site.plan import remaining_plan
from common.site.policy import check_lifetime, check_request, check_study
from common.study import Study

log = logging.getLogger("fedcorpus.site")

PROFILE = "profile"
VOTES = "votes"

_DOOR = object()
"""Held by this module alone: the right to make a `Release`."""


@dataclass(frozen=True)
class Task:
    """What to compute: it has been charged.

    Attributes
    ----------
    plan
        Noise and sampling of this run, from the study and this site's size class.
    parts
        The parts of the plan to compute; others were given out before.
    kept
        What the run's last answer kept for this one, by name: already noised.
    """

    plan: PrivacyPlan
    parts: Sequence[str]
    kept: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Answer:
    """What was computed, by name.

    Attributes
    ----------
    released
        Leaves the site.
    kept
        Stays in the ledger for the run's next answer, replacing what the last one kept. It is `Noised` too: what a
        later answer is made of may not know more than what has left.
    """

    released: Mapping[str, Noised]
    kept: Mapping[str, Noised] = field(default_factory=dict)


Compute = Callable[[Task], Answer]

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
            Reads what is needed and returns what computes an `Answer` to a `Task`. Each is called at most once; the
            latter after the charge is durable.

        Raises
        ------
        PolicyRefusal, BudgetExceededError
            If this site doesn't allow it. Nothing was charged.
        LedgerError, ConflictError
            If the ledger can't be trusted or written, or knows the request with other content.
        """
        site, study, run, key = self._site, request.study, request.run_id, request.key
        wanted = _wanted_parts(request)
        _refuse_unplanned(site, request, wanted, _planned_parts(site, study))
        whole = check_study(site, study)
        check_request(site, request)
        with Ledger.of(site) as ledger, ledger.exclusive():
            ledger.check_not_restored(request.seen)
            stored = ledger.stored(site.name, study.sha256, run, key, request.digest)
            if stored is None:
                self._require_approval(ledger, study)
                _refuse_closed(ledger, site, request)
                planned = self._plan_of_run(ledger, request)
                _refuse_unplanned(site, request, wanted, planned)
                plan = remaining_plan(whole, study, _first_round(planned))
                self._require_budget(ledger, study, run, plan)
                kept = _unpacked(ledger.kept(site.name, study.sha256, run))
                compute = prepare()
                ledger.reserve(site, study, run, plan, planned)
                parts = ledger.unspent(site.name, study.sha256, run, wanted)
                answer = compute(Task(plan, parts, kept))
                stored, keep = _packed(answer.released), _packed(answer.kept) if answer.kept else b""
                ledger.store(site.name, study.sha256, run, key, request.digest, parts, stored, kept=keep)
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

    def _plan_of_run(self, ledger: Ledger, request: Request) -> list[str]:
        """The parts that a run is charged for; if it isn't yet, all that it can still ask for, from this request on.

        So a site that joins late is charged for the rounds that are left, and earlier ones can't be asked for later.
        """
        known = ledger.reservation(self._site.name, request.study.sha256, request.run_id)
        if known is not None:
            return list(known["parts"])
        first = request.round if isinstance(request, TrainRequest) else 1
        return _planned_parts(self._site, request.study, first)

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


def _planned_parts(site: Site, study: Study, first_round: int = 1) -> list[str]:
    """Everything a run may ever take from this site, if it takes nothing before ``first_round``."""
    if site.tier == "weak":
        return [PROFILE, VOTES]
    return [PROFILE, *(f"train/{round_}" for round_ in range(first_round, study.training.rounds + 1))]


def _first_round(parts: Sequence[str]) -> int:
    """The first training round among the parts of a plan; 1 if there is none."""
    return min((int(part.removeprefix("train/")) for part in parts if part.startswith("train/")), default=1)


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
        f"door: {request.key!r} asks a {site.tier!r} site for {list(parts)}; in this run it releases {list(planned)}"
    )


def _refuse_closed(ledger: Ledger, site: Site, request: Request) -> None:
    if ledger.is_closed(site.name, request.study.sha256, request.run_id):
        raise PolicyRefusal(f"site {site.name!r} has closed run {request.run_id!r}: it gives out nothing new for it")


def _packed(computed: Mapping[str, Noised]) -> bytes:
    for name, value in computed.items():
        if not isinstance(value, Noised):
            raise LedgerError(f"door: {name!r} is a {type(value).__name__}; only Noised values are released or kept")
    return protocol.pack_release({name: value.array for name, value in computed.items()})


def _unpacked(kept: bytes) -> Mapping[str, NDArray[Any]]:
    return protocol.unpack_release(kept) if kept else {}
