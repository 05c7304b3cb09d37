"""What a hostile weak site answers to the vote, for experiments on what one can do.

It takes its own honest answer, from its own door, and puts another in its place: nothing keeps a site from that. What
the coordinator does about it is `server.strategies.plausibility`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from flwr.app import Context, Message
from numpy.typing import NDArray

from common.client_app import app as client_app
from common.errors import ProtocolError
from common.protocol import PROFILE_AND_VOTE, CandidatePool, LedgerHead, VoteReply, pack_release, release_records
from common.study import Study
from server.experiments.grid import Answer

Counts = NDArray[np.int64]
Lie = Callable[[Counts, Counts, CandidatePool, Study], tuple[Counts, Counts]]
"""(honest profile, honest ballot, pool, study) -> the profile and the ballot that it sends."""

FAVOURITES = 3
"""Candidates of every code that a stuffed ballot is for."""


def hostile(kind: str, study: Study, pool: CandidatePool) -> Answer:
    """A site that lies about its votes, and is honest in all else."""
    lie = LIES[kind]

    def answer(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        if message.metadata.message_type != PROFILE_AND_VOTE or reply.has_error():
            return reply
        honest = VoteReply.from_records(reply.content, len(study.codes), len(pool))
        profile, ballot = lie(honest.profile, honest.ballot, pool, study)
        sent = release_records(pack_release({"profile": profile, "ballot": ballot}), _head(honest))
        return Message(sent, reply_to=message)

    return answer


def stuffed(profile: Counts, ballot: Counts, pool: CandidatePool, study: Study) -> tuple[Counts, Counts]:
    """Claims as many units as the study lets a site count for, and gives all votes to what it finds worst."""
    codes = len(study.codes)
    claimed = np.full(codes, study.federation.max_units // codes, dtype=np.int64)
    sent = np.zeros_like(ballot)
    for code in range(codes):
        own = np.flatnonzero(pool.codes == code)
        worst = own[np.argsort(ballot[own], kind="stable")[:FAVOURITES]]
        sent[worst] = claimed[code]
    return claimed, sent


def inverted(profile: Counts, ballot: Counts, pool: CandidatePool, study: Study) -> tuple[Counts, Counts]:
    """Votes the more for a candidate the fewer of its documents are near to it."""
    sent = np.zeros_like(ballot)
    for code in range(len(study.codes)):
        own = np.flatnonzero(pool.codes == code)
        if own.size:
            sent[own] = ballot[own].max() - ballot[own]
    return profile, sent


LIES: Mapping[str, Lie] = {"stuffed": stuffed, "inverted": inverted}


def _head(honest: VoteReply) -> LedgerHead:
    if honest.ledger is None:
        raise ProtocolError("vote reply: has no head of a ledger; every door adds one")
    return honest.ledger
