"""Phase 2: one round in which the weak sites profile and vote. One message each way per site (RAFT, phase 2).

Nothing queues for a site that is offline: Flower answers for it at once. So the round is a window. A site is asked
when it is online, and asked again, with the same question, if it was lost with the question in hand; its ledger then
gives the stored bytes, so an answer costs once and counts once. A site that shows up for the first time while the
window is open is taken in. What an answer says beyond what is plausible is capped (`plausibility`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from common.errors import FedcorpusError, QuorumError
from common.protocol import PROFILE_AND_VOTE, CandidatePool, VoteReply, VoteRequest, addressed
from common.site.plan import weak_plan
from common.study import Study
from server.census import ANSWER_SECONDS, Roster, SiteRecord, failure_code, lost_on_the_way, welcome
from server.known_site import NOT_ASKED
from server.progress import Progress
from server.strategies.plausibility import plausible

log = logging.getLogger("fedcorpus.server")

POLL_SECONDS = 1.0
MAX_TRIES = 3


@dataclass(frozen=True)
class Ballots:
    """Result of phase 2; everything is noised.

    Attributes
    ----------
    profiles
        Noisy profile of each weak site that answered, int64 ``(codes,)``; plausible.
    ballots
        Noisy votes of each weak site that answered, int64 ``(candidates,)``; plausible.
    """

    profiles: Mapping[str, NDArray[np.int64]]
    ballots: Mapping[str, NDArray[np.int64]]


class ProfileAndVote:
    """The vote round over the weak sites of a roster."""

    def __init__(self, study: Study, run_id: str, roster: Roster, progress: Progress) -> None:
        self._study = study
        self._run_id = run_id
        self._roster = roster
        self._sites = {site.node_id: site for site in roster.of_tier("weak")}
        self._progress = progress
        self._plan = weak_plan(study)
        self._losses: Counter[int] = Counter()

    def collect(self, grid: Grid, pool: CandidatePool) -> Ballots:
        """Ask every weak site once, until all have answered or the window closes.

        Raises
        ------
        QuorumError
            If fewer weak sites than the study's minimum gave a valid answer.
        """
        records = VoteRequest(self._study, self._run_id, pool).to_records()
        replies: dict[int, VoteReply] = {}
        pending: dict[str, int] = {}
        tries: Counter[int] = Counter()
        deadline = time.monotonic() + self._study.federation.vote_seconds
        for site in self._sites.values():
            # Whatever it was in an earlier attempt of the run.
            site.outcome = NOT_ASKED
        self._take_in_newcomers(grid, deadline)
        while (open_ := self._open(replies, pending, tries)) and time.monotonic() < deadline:
            ready = sorted(set(open_) & set(grid.get_node_ids()) - set(pending.values()))
            messages = [
                Message(
                    addressed(records, self._sites[node].ledger),
                    dst_node_id=node,
                    message_type=PROFILE_AND_VOTE,
                    group_id="votes",
                )
                for node in ready
            ]
            for message, message_id in zip(messages, grid.push_messages(messages) if messages else [], strict=True):
                tries[message.metadata.dst_node_id] += 1
                if message_id:
                    pending[message_id] = message.metadata.dst_node_id
            for reply in grid.pull_messages(list(pending)) if pending else []:
                node = pending.pop(reply.metadata.reply_to_message_id)
                self._take(node, reply, pool, replies, tries)
            self._show(replies, pending)
            if len(replies) < len(self._sites):
                time.sleep(POLL_SECONDS)
                self._take_in_newcomers(grid, deadline)
        self._close(replies)
        return Ballots(
            profiles={self._sites[node].name: reply.profile for node, reply in replies.items()},
            ballots={self._sites[node].name: reply.ballot for node, reply in replies.items()},
        )

    def _take_in_newcomers(self, grid: Grid, deadline: float) -> None:
        # A newcomer that keeps its answer to the census to itself may not hold the window open.
        left = min(ANSWER_SECONDS, deadline - time.monotonic())
        if left <= 0:
            return
        for site in welcome(grid, self._study, self._run_id, self._roster, timeout=left):
            self._progress.note(f"{site.tier} site {site.name} has joined")
            if site.tier == "weak":
                self._sites[site.node_id] = site

    def _open(self, replies: Mapping[int, VoteReply], pending: Mapping[str, int], tries: Counter[int]) -> list[int]:
        """Sites that may still answer."""
        waiting = set(pending.values())
        return [n for n in self._sites if n not in replies and (n in waiting or tries[n] < MAX_TRIES)]

    def _take(
        self, node: int, message: Message, pool: CandidatePool, replies: dict[int, VoteReply], tries: Counter[int]
    ) -> None:
        site = self._sites[node]
        if message.has_error():
            self._lost(site, failure_code(message))
            if lost_on_the_way(message):
                self._losses[node] += 1
            else:
                tries[node] = MAX_TRIES
            return
        try:
            reply = VoteReply.from_records(message.content, len(self._study.codes), len(pool))
        except FedcorpusError:
            self._lost(site, "malformed ballot")
            tries[node] = MAX_TRIES
            return
        site.answered()
        within = plausible(self._study, self._plan, pool.codes, reply.profile, reply.ballot)
        replies[node] = replace(reply, profile=within.profile, ballot=within.ballot)
        if within.capped:
            site.capped()
            self._progress.note(f"weak site {site.name}: {site.outcome}")
        self._roster.saw(site, reply.ledger)

    def _show(self, replies: Mapping[int, VoteReply], pending: Mapping[str, int]) -> None:
        """Who has answered, for the coordinator to watch."""
        asked = set(pending.values())
        states = {}
        for node, site in self._sites.items():
            state = "asked" if node in asked else "not there yet" if site.outcome == NOT_ASKED else site.outcome
            lost = self._losses[node]
            states[site.name] = state + (f", lost {lost} time{'s' if lost > 1 else ''}" if lost else "")
        self._progress.sites("votes", states)
        self._progress.step("votes", len(replies), len(self._sites))

    def _lost(self, site: SiteRecord, reason: str) -> None:
        site.failed(reason)
        self._progress.note(f"weak site {site.name}: {reason}")

    def _close(self, replies: Mapping[int, VoteReply]) -> None:
        for node, site in self._sites.items():
            if node not in replies and site.outcome == NOT_ASKED:
                self._lost(site, "no answer in time")
        self._show(replies, {})
        needed = self._study.federation.min_weak
        if len(replies) < needed:
            states = ", ".join(f"{site.name} ({site.outcome})" for site in self._sites.values())
            raise QuorumError(f"vote round: {len(replies)} weak sites answered, the study needs {needed}: {states}")
