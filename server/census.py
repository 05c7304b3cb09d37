"""The census: who is there, of which tier, and do they accept this study? Bounded; nobody is waited for for ever."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from common.errors import FedcorpusError, QuorumError, WireCode
from common.protocol import CENSUS, CensusReply, CensusRequest, LedgerHead
from common.study import Study
from server.ledger_heads import LedgerHeads
from server.progress import Progress

POLL_SECONDS = 1.0
ANSWER_SECONDS = 60.0
ANSWERED = "answered"

_LOST_CODES = {
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
}


@dataclass
class SiteRecord:
    """What the coordinator knows of one site: public facts, and how it has fared in this run."""

    node_id: int
    name: str
    tier: str
    size_class: int
    answers: int = 0
    outcome: str = "not asked"
    ledger: LedgerHead | None = None
    """The head of its ledger that it must know: the last one seen."""

    def answered(self) -> None:
        """It gave a valid answer."""
        self.answers += 1
        self.outcome = ANSWERED

    def failed(self, reason: str) -> None:
        """Its contribution is missing; ``reason`` is a code, never a text from the site."""
        self.outcome = reason


@dataclass
class Roster:
    """The sites that take part, those that answered the census but don't, and how far all of their ledgers are."""

    sites: dict[int, SiteRecord] = field(default_factory=dict)
    refused: list[SiteRecord] = field(default_factory=list)
    heads: LedgerHeads = field(default_factory=lambda: LedgerHeads(None))

    def saw(self, site: SiteRecord, head: LedgerHead | None) -> None:
        """Note where a site's ledger stands after its answer."""
        if head is not None and (site.ledger is None or head.ledger == site.ledger.ledger):
            site.ledger = head
            self.heads.note(head)

    def of_tier(self, tier: str) -> list[SiteRecord]:
        """Sites of a tier, by name."""
        return sorted((s for s in self.sites.values() if s.tier == tier), key=lambda s: s.name)

    @property
    def all(self) -> list[SiteRecord]:
        """Every site that was heard of."""
        return [*self.of_tier("strong"), *self.of_tier("weak"), *self.refused]


def take_census(grid: Grid, study: Study, run_id: str, progress: Progress, heads: LedgerHeads | None = None) -> Roster:
    """Ask every node that shows up until the expected number answered or the deadline passed.

    Raises
    ------
    QuorumError
        If the study's quorum isn't there; names who is, and why others aren't.
    """
    roster, asked = Roster(heads=heads or LedgerHeads(None)), set[int]()
    expected = study.federation.expected_sites
    deadline = time.monotonic() + study.federation.census_seconds
    while len(roster.sites) < expected:
        nodes = {node.node_id: str(node.name) for node in grid.get_nodes()}
        new = [node for node in nodes if node not in asked]
        asked.update(new)
        for node, reply in _ask(grid, new, study, run_id):
            if lost_on_the_way(reply):
                # It went away with the question in hand; it is asked again when it shows up.
                asked.discard(node)
                continue
            _enrol(roster, node, reply, nodes[node], study)
        progress.step("census", len(roster.sites), expected)
        if time.monotonic() >= deadline or len(roster.all) >= expected:
            break
        time.sleep(POLL_SECONDS)
    _announce(roster, study, progress)
    _require_quorum(roster, study)
    return roster


def lost_on_the_way(message: Message) -> bool:
    """Whether a message, node or client process went away, so that asking again may help. A refusal is final."""
    return bool(message.has_error()) and int(message.error.code) in _LOST_CODES


def failure_code(message: Message) -> str:
    """The name of an error reply's code. The reason's text comes from a stranger and is not repeated."""
    code = int(message.error.code)
    return WireCode(code).name if code in WireCode._value2member_map_ else f"FLOWER_ERROR_{code}"


def _ask(grid: Grid, nodes: Iterable[int], study: Study, run_id: str) -> list[tuple[int, Message]]:
    records = CensusRequest(study, run_id).to_records()
    messages = [Message(records, dst_node_id=node, message_type=CENSUS, group_id="census") for node in nodes]
    if not messages:
        return []
    replies = list(grid.send_and_receive(messages, timeout=ANSWER_SECONDS))
    waiting = sent_to(messages)
    return [(waiting[r.metadata.reply_to_message_id], r) for r in replies]


def sent_to(messages: Iterable[Message]) -> Mapping[str, int]:
    """Message id -> node, of messages that were pushed. An error reply made by the SuperLink names no node itself."""
    return {m.metadata.message_id: m.metadata.dst_node_id for m in messages}


def _enrol(roster: Roster, node: int, message: Message, registered: str, study: Study) -> None:
    name = registered or f"node-{node}"
    if message.has_error():
        roster.refused.append(SiteRecord(node, name, "unknown", 0, outcome=f"refused: {failure_code(message)}"))
        return
    try:
        reply = CensusReply.from_records(message.content)
    except FedcorpusError:
        roster.refused.append(SiteRecord(node, name, "unknown", 0, outcome="refused: malformed census reply"))
        return
    site = SiteRecord(node, reply.name, reply.tier, reply.size_class)
    objection = _objection(roster, reply, registered, study)
    if objection:
        site.failed(f"refused: {objection}")
        roster.refused.append(site)
        return
    roster.sites[node] = site
    if reply.ledger is not None:
        # An older head, from an earlier run, is asked back first: so a fork that has grown further is noticed too.
        site.ledger = roster.heads.last(reply.ledger.ledger) or reply.ledger
        roster.heads.note(reply.ledger)


def _objection(roster: Roster, reply: CensusReply, registered: str, study: Study) -> str:
    if reply.refusal is not None:
        return reply.refusal.name
    if reply.study_sha256 != study.sha256:
        return "it read another study"
    if registered and registered != reply.name:
        return "its node key is registered under another name"
    if reply.ledger is not None and roster.heads.is_behind(reply.ledger):
        return "its ledger is an older copy than one seen before"
    if reply.name in {site.name for site in roster.sites.values()}:
        return "another site has this name"
    return ""


def _announce(roster: Roster, study: Study, progress: Progress) -> None:
    strong, weak = len(roster.of_tier("strong")), len(roster.of_tier("weak"))
    progress.note(f"{strong} strong and {weak} weak sites take part; {study.federation.expected_sites} were expected")
    for site in roster.refused:
        progress.note(f"site {site.name} doesn't take part: {site.outcome}")


def _require_quorum(roster: Roster, study: Study) -> None:
    for tier, needed in (("strong", study.federation.min_strong), ("weak", study.federation.min_weak)):
        there = [site.name for site in roster.of_tier(tier)]
        if len(there) < needed:
            others = [f"{site.name} ({site.outcome})" for site in roster.refused]
            raise QuorumError(
                f"census: {len(there)} {tier} sites take part ({', '.join(there) or 'none'}), the study needs "
                f"{needed}; others heard of: {', '.join(others) or 'none'}"
            )
