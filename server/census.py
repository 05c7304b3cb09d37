"""The census: who is there, of which tier, and do they accept this study? Bounded; nobody is waited for for ever."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from common.errors import FedcorpusError, QuorumError, WireCode
from common.protocol import CENSUS, CensusReply, CensusRequest, LedgerHead
from common.study import Study
from server.known_site import NOT_ASKED, KnownSite
from server.ledger_heads import LedgerHeads
from server.progress import Progress

POLL_SECONDS = 1.0
ANSWER_SECONDS = 60.0
ANSWERED = "answered"
CAPPED = "answered more than its units can; capped"
NO_NODE = 0
"""Node of a site that isn't there."""

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
    outcome: str = NOT_ASKED
    ledger: LedgerHead | None = None
    """The head of its ledger that it must know: the last one seen."""

    def answered(self) -> None:
        """It gave a valid answer."""
        self.answers += 1
        self.outcome = ANSWERED

    def capped(self) -> None:
        """It gave an answer beyond what is plausible, which counts as far as that."""
        self.outcome = CAPPED

    def failed(self, reason: str) -> None:
        """Its contribution is missing; ``reason`` is a code, never a text from the site."""
        self.outcome = reason


@dataclass
class Roster:
    """The sites that take part, those that answered the census but don't, and how far all of their ledgers are."""

    sites: dict[int, SiteRecord] = field(default_factory=dict)
    refused: list[SiteRecord] = field(default_factory=list)
    gone: list[SiteRecord] = field(default_factory=list)
    """Sites that took part in an earlier attempt of this run and aren't there now: what they gave counts."""
    heads: LedgerHeads = field(default_factory=lambda: LedgerHeads(None))
    asked: set[int] = field(default_factory=set)
    """Nodes that the census has asked."""

    def saw(self, site: SiteRecord, head: LedgerHead | None) -> None:
        """Note where a site's ledger stands after its answer."""
        if head is not None and (site.ledger is None or head.ledger == site.ledger.ledger):
            site.ledger = head
            self.heads.note(head)

    def recall(self, earlier: Sequence[KnownSite]) -> None:
        """Take over what an earlier attempt of the run knew of its sites."""
        here = {site.name: site for site in [*self.sites.values(), *self.refused]}
        for known in earlier:
            site = here.get(known.name) or SiteRecord(NO_NODE, known.name, known.tier, known.size_class)
            site.answers = known.answers
            if site.outcome == NOT_ASKED:
                site.outcome = known.outcome
            elif known.outcome not in (NOT_ASKED, site.outcome):
                site.outcome = f"{known.outcome}, then {site.outcome}"
            if known.name not in here:
                # It may have been asked after that was written: it counts as charged.
                site.outcome = "lost with an earlier attempt" if known.outcome == NOT_ASKED else known.outcome
                self.gone.append(site)

    def known(self) -> tuple[KnownSite, ...]:
        """What a later attempt of the run needs to know of the sites."""
        return tuple(
            KnownSite(
                name=site.name,
                tier=site.tier,
                size_class=site.size_class,
                answers=site.answers,
                outcome=site.outcome,
            )
            for site in self.all
        )

    def of_tier(self, tier: str) -> list[SiteRecord]:
        """Sites of a tier, by name."""
        return sorted((s for s in self.sites.values() if s.tier == tier), key=lambda s: s.name)

    @property
    def all(self) -> list[SiteRecord]:
        """Every site that was heard of."""
        return [*self.of_tier("strong"), *self.of_tier("weak"), *self.gone, *self.refused]


def take_census(
    grid: Grid,
    study: Study,
    run_id: str,
    progress: Progress,
    heads: LedgerHeads | None = None,
    tiers: Collection[str] = ("strong", "weak"),
) -> Roster:
    """Ask every node that shows up until the expected number answered or the deadline passed.

    Parameters
    ----------
    tiers
        Those whose quorum must be there: a run that goes on after its training needs no strong site.

    Raises
    ------
    QuorumError
        If the study's quorum isn't there; names who is, and why others aren't.
    """
    roster = Roster(heads=heads or LedgerHeads(None))
    expected = study.federation.expected_sites
    deadline = time.monotonic() + study.federation.census_seconds
    while len(roster.sites) < expected:
        welcome(grid, study, run_id, roster)
        progress.step("census", len(roster.sites), expected)
        if time.monotonic() >= deadline or len(roster.all) >= expected:
            break
        time.sleep(POLL_SECONDS)
    _announce(roster, study, progress)
    _require_quorum(roster, study, tiers)
    return roster


def welcome(grid: Grid, study: Study, run_id: str, roster: Roster, timeout: float = ANSWER_SECONDS) -> list[SiteRecord]:
    """Ask the nodes that the census hasn't asked yet, and return those that now take part."""
    nodes = {node.node_id: str(node.name) for node in grid.get_nodes()}
    new = [node for node in nodes if node not in roster.asked]
    roster.asked.update(new)
    for node, reply in _ask(grid, new, study, run_id, timeout):
        if lost_on_the_way(reply):
            # It went away with the question in hand; it is asked again when it shows up.
            roster.asked.discard(node)
            continue
        _enrol(roster, node, reply, nodes[node], study)
    return [roster.sites[node] for node in new if node in roster.sites]


def lost_on_the_way(message: Message) -> bool:
    """Whether a message, node or client process went away, so that asking again may help. A refusal is final."""
    return bool(message.has_error()) and int(message.error.code) in _LOST_CODES


def failure_code(message: Message) -> str:
    """The name of an error reply's code. The reason's text comes from a stranger and is not repeated."""
    code = int(message.error.code)
    return WireCode(code).name if code in WireCode._value2member_map_ else f"FLOWER_ERROR_{code}"


def _ask(grid: Grid, nodes: Iterable[int], study: Study, run_id: str, timeout: float) -> list[tuple[int, Message]]:
    records = CensusRequest(study, run_id).to_records()
    messages = [Message(records, dst_node_id=node, message_type=CENSUS, group_id="census") for node in nodes]
    if not messages:
        return []
    replies = list(grid.send_and_receive(messages, timeout=timeout))
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
    for earlier in [known for known in roster.gone if known.name == site.name]:
        # It took part in an earlier attempt, and is back.
        site.answers, site.outcome = earlier.answers, earlier.outcome
        roster.gone.remove(earlier)
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


def _require_quorum(roster: Roster, study: Study, tiers: Collection[str]) -> None:
    for tier, needed in (("strong", study.federation.min_strong), ("weak", study.federation.min_weak)):
        if tier not in tiers:
            continue
        there = [site.name for site in roster.of_tier(tier)]
        if len(there) < needed:
            others = [f"{site.name} ({site.outcome})" for site in roster.refused]
            raise QuorumError(
                f"census: {len(there)} {tier} sites take part ({', '.join(there) or 'none'}), the study needs "
                f"{needed}; others heard of: {', '.join(others) or 'none'}"
            )
