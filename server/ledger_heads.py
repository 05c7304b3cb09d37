"""What the coordinator remembers of the sites' ledgers, so that a copy restored from a backup is noticed.

A site can't know that its own ledger is an old copy. The coordinator has seen how far each ledger had come, tells the
site with every question, and refuses a site whose ledger is behind. The file outlives runs.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from common.errors import UserError
from common.protocol import LedgerHead
from server.workspace import write_atomically

_FILE = "ledger-heads.json"


class LedgerHeads:
    """The last head seen of every ledger.

    Parameters
    ----------
    folder
        Where the file lies; None remembers for the life of this object only.

    Raises
    ------
    UserError
        If the folder can't be written, or the file can't be read: forgetting what was seen is not an option.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / _FILE
        self._heads: dict[str, LedgerHead] = {}
        if folder is not None:
            _make(folder)
        self._read()

    def last(self, ledger: str) -> LedgerHead | None:
        """The furthest head that was seen of a ledger."""
        return self._heads.get(ledger)

    def is_behind(self, head: LedgerHead) -> bool:
        """Whether a ledger stands before, or beside, where it was seen."""
        seen = self.last(head.ledger)
        if seen is None:
            return False
        return head.sequence < seen.sequence or (head.sequence == seen.sequence and head.hash != seen.hash)

    def note(self, head: LedgerHead) -> None:
        """Remember a head, durably; one that is behind changes nothing."""
        if self._path is None:
            self._keep(head)
            return
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another run of this coordinator may have written meanwhile.
            self._read()
            if self._keep(head):
                write_atomically(self._path, _encoded(self._heads))

    def _keep(self, head: LedgerHead) -> bool:
        if self.is_behind(head):
            return False
        self._heads[head.ledger] = head
        return True

    def _read(self) -> None:
        if self._path is None or not self._path.exists():
            return
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            self._heads = {k: LedgerHead(k, int(v["sequence"]), str(v["hash"])) for k, v in stored.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
            raise UserError(f"{self._path}: not the heads of ledgers; restore the file from a backup") from cause


def state_folder() -> Path:
    """Where a coordinator's state lies: ``$XDG_STATE_HOME/fedcorpus``, as the desktop standard says."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "fedcorpus"


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise UserError(
            f"{folder}: can't be made: {cause.strerror}; set XDG_STATE_HOME to a folder of yours"
        ) from cause
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: can't be written; set XDG_STATE_HOME to a folder of yours")


def _encoded(heads: dict[str, LedgerHead]) -> bytes:
    return json.dumps({k: {"sequence": h.sequence, "hash": h.hash} for k, h in heads.items()}, indent=1).encode()
