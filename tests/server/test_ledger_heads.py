"""The coordinator's memory of ledgers: it outlives runs, only grows, and is never silently lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from common.protocol import LedgerHead
from server.ledger_heads import LedgerHeads, state_folder

FIRST, SECOND = LedgerHead("a" * 32, 3, "1" * 64), LedgerHead("a" * 32, 5, "2" * 64)


def test_heads_outlive_the_process_and_only_grow(tmp_path: Path) -> None:
    LedgerHeads(tmp_path).note(SECOND)
    heads = LedgerHeads(tmp_path)
    assert heads.last(SECOND.ledger) == SECOND
    assert heads.is_behind(FIRST)
    assert heads.is_behind(LedgerHead("a" * 32, 5, "3" * 64)), "as far, but another history"
    assert not heads.is_behind(SECOND)
    assert not heads.is_behind(LedgerHead("b" * 32, 1, "3" * 64))
    heads.note(FIRST)
    assert LedgerHeads(tmp_path).last(SECOND.ledger) == SECOND


def test_two_runs_of_one_coordinator_lose_nothing(tmp_path: Path) -> None:
    one, two = LedgerHeads(tmp_path), LedgerHeads(tmp_path)
    one.note(SECOND)
    two.note(LedgerHead("b" * 32, 1, "3" * 64))
    assert LedgerHeads(tmp_path).last(SECOND.ledger) == SECOND
    assert two.is_behind(FIRST), "it has read what the other wrote"


def test_without_a_folder_it_remembers_for_its_own_life(tmp_path: Path) -> None:
    heads = LedgerHeads(None)
    heads.note(SECOND)
    heads.note(FIRST)
    assert heads.is_behind(FIRST)
    assert LedgerHeads(None).last(SECOND.ledger) is None


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": {"sequence": "x", "hash": "b"}}'])
def test_a_damaged_memory_is_an_error_not_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "ledger-heads.json").write_text(content)
    with pytest.raises(UserError, match="restore the file"):
        LedgerHeads(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="XDG_STATE_HOME"):
        LedgerHeads(tmp_path / "file" / "fedcorpus")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert state_folder() == tmp_path / "state" / "fedcorpus"
