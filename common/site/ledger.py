"""The ledger: a site's durable, append-only record of every release and what it cost.

One chain of events, each carrying the hash of the one before it:

    opened        the ledger's own random name
    asked         a study that waits for a person of this site
    decision      a person agreed to a study, or declined it
    reservation   a run's whole plan is charged, before its first release is computed
    release       a question was answered: its digest, the parts of the plan that this spent, the hash of the bytes
    closed        a person ended a run at this site: it gets no further release

The file is a `common.site.journal`: nothing in it is changed or taken out unseen. The noised bytes lie beside the
events, and so does what a run's last release kept for its next one, noised as well. Nothing exact is ever written here.
A copy that was restored from a backup is betrayed by the coordinator, which tells the site the last head it saw.

Spent counts from the reservation, and closing a run refunds no epsilon: how far a run got may depend on what it gave
out, and the epsilon of a plan that was stopped in view of its outputs is the whole plan's. A Renyi filter alone may
count what was given out, as it holds for any choice made on the way (Feldman & Zrnic 2021).

A site that sets a key has contents and bytes encrypted.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from common.errors import ConflictError, LedgerError, LedgerRestoredError, PolicyRefusal
from common.privacy.accounting import (
    VERIFY_INTERVAL,
    Mechanism,
    PrivacyPlan,
    SubsampledGaussian,
    describe,
    described,
)
from common.protocol import LedgerHead
from common.site.config import Policy, Site
from common.site.files import create_private
from common.site.journal import FORMAT, Event, Journal, sha256
from common.site.policy import Charge, check_lifetime
from common.study import Study

MOST_PENDING = 100
"""Studies that may wait for a decision at once."""

Verdict = Literal["approved", "declined"]


class Ledger:
    """One site's ledger file. Releases are made inside `Ledger.exclusive`: one at a time.

    Parameters
    ----------
    path
        The file; made if it isn't there.
    key
        32 bytes, or None for a ledger in the clear.

    Raises
    ------
    LedgerError
        If the file can't be read or written, its hash chain is broken, or the key isn't its own. Then nothing is
        released.
    """

    def __init__(self, path: Path, key: bytes | None = None) -> None:
        self._path = path
        self._journal = Journal(path, key)

    @classmethod
    def of(cls, site: Site) -> Ledger:
        """The ledger of a site. Raises as the constructor does."""
        return cls(site.ledger_path, site.ledger_key())

    def close(self) -> None:
        """Close the file."""
        self._journal.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def exclusive(self) -> Iterator[Ledger]:
        """Hold the site's one lock: from looking a request up until its answer is stored."""
        lock_path = self._path.with_suffix(".lock")
        try:
            create_private(lock_path)
            lock = lock_path.open("r+")
        except OSError as cause:
            raise LedgerError(f"{lock_path}: the ledger's lock can't be opened: {cause}") from cause
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self

    def head(self) -> LedgerHead:
        """Where the chain stands now."""
        first, last = self._journal.first(), self._journal.last()
        return LedgerHead(str(first.content["ledger"]), last.sequence, last.hash)

    def check_not_restored(self, seen: LedgerHead | None) -> None:
        """Refuse to go on from an older copy than the one that the coordinator saw.

        Raises
        ------
        LedgerRestoredError
        """
        if seen is None:
            return
        own = self.head()
        if seen.ledger != own.ledger:
            raise LedgerRestoredError(
                f"{self._path}: is ledger {own.ledger[:12]}…, but the coordinator saw {seen.ledger[:12]}… at this "
                "site; it was deleted or replaced, and what was spent is unknown"
            )
        event = self._journal.at(seen.sequence)
        if event is None or event.hash != seen.hash:
            raise LedgerRestoredError(
                f"{self._path}: stands at event {own.sequence}, but the coordinator saw another event "
                f"{seen.sequence}; it was restored from an old copy, and what was spent since is unknown"
            )

    def charges(self, assets: Sequence[str]) -> list[Charge]:
        """What was charged on data that ``assets`` overlap with. No asset named means all data of the site."""
        return [
            Charge(c["epsilon"], c["delta"], tuple(self._mechanisms(c)))
            for c in self.runs()
            if _overlap(assets, c["assets"])
        ]

    def spent(self, assets: Sequence[str] = ()) -> tuple[float, float]:
        """(epsilon, delta) charged so far on overlapping data, added up."""
        charges = self.charges(assets)
        return sum(charge.epsilon for charge in charges), sum(charge.delta for charge in charges)

    def reservation(self, site: str, study: str, run: str) -> Mapping[str, Any] | None:
        """What a run was charged, or None."""
        event = self._journal.find("reservation", site, study, run)
        return None if event is None else event.content

    def stored(self, site: str, study: str, run: str, key: str, digest: str) -> bytes | None:
        """The bytes that answered this request before, or None.

        Raises
        ------
        ConflictError
            If the key was answered for a question with other content.
        LedgerError
            If the bytes aren't those that were stored.
        """
        event = self._journal.find("release", site, study, run, key)
        if event is None:
            return None
        if event.content["digest"] != digest:
            raise ConflictError(
                f"{self._path}: {key!r} of run {run!r} was answered for a question with digest "
                f"{event.content['digest'][:12]}…; this one has {digest[:12]}…, and an answer is given once"
            )
        stored = self._journal.bytes_of(event, site, study, run, key)
        if sha256(stored) != event.content["sha256"]:
            raise LedgerError(f"{self._path}: the bytes of release {event.sequence} were changed; nothing is released")
        return stored

    def unspent(self, site: str, study: str, run: str, parts: Sequence[str]) -> list[str]:
        """Those of ``parts`` that the run hasn't given out yet."""
        spent = self._spent(site, study, run)
        return [part for part in parts if part not in spent]

    def kept(self, site: str, study: str, run: str) -> bytes:
        """What the last release of a run kept for its next one; empty if there is nothing.

        Raises
        ------
        LedgerError
            If it isn't what that release kept.
        """
        releases = self._releases(site, study, run)
        if not releases or "kept" not in releases[-1].content:
            return b""
        last = releases[-1]
        kept = self._journal.kept(last, site, study, run)
        if sha256(kept) != last.content["kept"]:
            raise LedgerError(f"{self._path}: what release {last.sequence} kept was changed; nothing is released")
        return kept

    def runs(self) -> list[Mapping[str, Any]]:
        """What every run was charged, in order."""
        return [event.content for event in self._journal.events("reservation")]

    def given_out(self, site: str, study: str, run: str) -> list[Mechanism]:
        """The mechanisms of what a run has given out so far: its plan's, with as many steps as rounds were answered.

        Raises
        ------
        LedgerError
            If the run was never charged.
        """
        charged = self.reservation(site, study, run)
        if charged is None:
            raise LedgerError(f"{self._path}: run {run!r} was never charged; a run that was is accepted")
        spent, planned = self._spent(site, study, run), charged["parts"]
        main, profile = (described(m) for m in charged["mechanisms"])
        parts = [part for part in planned if part != "profile"]
        done = sum(part in spent for part in parts)
        if isinstance(main, SubsampledGaussian):
            main = replace(main, steps=main.steps * done // len(parts))
        return [*([main] if done else []), *([profile] if "profile" in spent else [])]

    def close_run(self, site: str, study: str, run: str, person: str) -> None:
        """Note that a run gets nothing more from this site; what it got stays, and is handed out again if asked.

        Raises
        ------
        LedgerError
            If the run was never charged.
        """
        self.given_out(site, study, run)
        content = {"site": site, "study": study, "run": run, "person": person}
        with self._journal.transaction():
            if not self.is_closed(site, study, run):
                self._journal.append("closed", content, site, study, run)

    def is_closed(self, site: str, study: str, run: str) -> bool:
        """Whether a person ended the run at this site."""
        return self._journal.find("closed", site, study, run) is not None

    def reserve(self, site: Site, study: Study, run: str, plan: PrivacyPlan, parts: Sequence[str]) -> None:
        """Charge a run's whole plan, durably, before its first release; a no-op for a run that is charged already.

        Raises
        ------
        BudgetExceededError
            If it would pass the lifetime cap.
        PolicyRefusal
            If the run was charged as another tier or for another plan.
        """
        mechanisms = [describe(m) for m in plan.mechanisms]
        with self._journal.transaction():
            known = self.reservation(site.name, study.sha256, run)
            if known is not None:
                if (known["tier"], known["mechanisms"]) != (site.tier, mechanisms):
                    raise PolicyRefusal(f"{self._path}: run {run!r} was reserved as {known['tier']!r} for another plan")
                return
            check_lifetime(site.policy, self.charges(site.documents.assets), plan)
            content = {
                "site": site.name,
                "study": study.sha256,
                "run": run,
                "tier": site.tier,
                "size_class": site.size_class,
                "unit": study.privacy.unit,
                "adjacency": "add or remove one unit",
                "assets": list(site.documents.assets),
                "epsilon": plan.epsilon,
                "delta": plan.delta,
                "accounting": plan.accounting,
                "mechanisms": mechanisms,
                "parts": list(parts),
                "accountant": f"dp-accounting {metadata.version('dp-accounting')} PLD, interval {VERIFY_INTERVAL:g}",
                "policy": _caps(site.policy),
            }
            self._journal.append("reservation", content, site.name, study.sha256, run)

    def store(
        self,
        site: str,
        study: str,
        run: str,
        key: str,
        digest: str,
        parts: Sequence[str],
        released: bytes,
        *,
        kept: bytes = b"",
    ) -> None:
        """Store the noised bytes of a release, durably, mark its parts as spent, and replace what the run kept.

        All or nothing: a release that is computed again, as its bytes were lost, begins where the first try began.

        Raises
        ------
        LedgerError
            If a part isn't in the run's plan or was spent before, or the disk refuses.
        """
        with self._journal.transaction():
            reserved = None if self.is_closed(site, study, run) else self.reservation(site, study, run)
            planned = [] if reserved is None else reserved["parts"]
            spent = self._spent(site, study, run)
            if wrong := sorted(set(parts) - set(planned) | set(parts) & spent):
                raise LedgerError(
                    f"{self._path}: {wrong} can't be given out in run {run!r}, which plans {planned} and gave out "
                    f"{sorted(spent)}"
                )
            content = {
                "site": site,
                "study": study,
                "run": run,
                "key": key,
                "digest": digest,
                "parts": list(parts),
                "sha256": sha256(released),
                "bytes": len(released),
            }
            if kept:
                content["kept"] = sha256(kept)
            self._journal.append("release", content, site, study, run, key, released=released)
            self._journal.keep(kept, site, study, run)

    def decide(self, site: str, study: str, verdict: Verdict, person: str) -> None:
        """Note that a person agreed to a study or declined it; the last word counts."""
        content = {"site": site, "study": study, "verdict": verdict, "person": person}
        with self._journal.transaction():
            self._journal.append("decision", content, str(self.head().sequence))

    def verdict(self, site: str, study: str) -> Verdict | None:
        """The last decision about a study, or None."""
        said = [
            e.content["verdict"]
            for e in self._journal.events("decision")
            if (e.content["site"], e.content["study"]) == (site, study)
        ]
        return said[-1] if said else None

    def ask(self, site: str, study: Study) -> None:
        """Keep a study for a person to look at. A coordinator can't fill the disk with it."""
        with self._journal.transaction():
            known = self._journal.find("asked", site, study.sha256)
            if known is None and len(self.pending(site)) < MOST_PENDING:
                self._journal.append(
                    "asked", {"site": site, "study": study.sha256, "canonical": study.canonical}, site, study.sha256
                )

    def asked(self, site: str) -> list[str]:
        """Hashes of all studies that ever waited for a person."""
        return [e.content["study"] for e in self._journal.events("asked") if e.content["site"] == site]

    def pending(self, site: str) -> list[Study]:
        """Studies that wait for a decision."""
        asked = [e.content for e in self._journal.events("asked") if e.content["site"] == site]
        return [Study.from_canonical(a["canonical"]) for a in asked if self.verdict(site, a["study"]) is None]

    def export(self, site: str) -> dict[str, Any]:
        """Every event and no bytes, for an auditor, under the name of the site that hands it out."""
        head = self.head()
        events = [
            {"sequence": e.sequence, "kind": e.kind, "content": e.content, "previous": e.previous, "hash": e.hash}
            for e in self._journal.events()
        ]
        return {"format": FORMAT, "site": site, "ledger": head.ledger, "events": events}

    def verify(self, *, blobs: bool = False) -> None:
        """Follow the hash chain, and on demand read every stored release back.

        Raises
        ------
        LedgerError
            At the first event that was changed, or whose predecessor is missing.
        """
        self._journal.verify()
        if not blobs:
            return
        for event in self._journal.events("release"):
            c = event.content
            self.stored(c["site"], c["study"], c["run"], c["key"], c["digest"])

    def _mechanisms(self, reserved: Mapping[str, Any]) -> list[Mechanism]:
        """What a reservation counts for in a Renyi filter."""
        run = reserved["site"], reserved["study"], reserved["run"]
        return self.given_out(*run) if self.is_closed(*run) else [described(m) for m in reserved["mechanisms"]]

    def _spent(self, site: str, study: str, run: str) -> set[str]:
        return {part for release in self._releases(site, study, run) for part in release.content["parts"]}

    def _releases(self, site: str, study: str, run: str) -> list[Event]:
        named = {"site": site, "study": study, "run": run}
        return [e for e in self._journal.events("release") if named.items() <= e.content.items()]


def _caps(policy: Policy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in ("max_epsilon", "max_delta", "composition")}


def _overlap(these: Sequence[str], those: Sequence[str]) -> bool:
    return not these or not those or not set(these).isdisjoint(those)
