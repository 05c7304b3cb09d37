"""All that a family started is ended, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from deploy import process_family
from deploy.process_family import MARK, ProcessFamily


def test_a_child_without_marker_or_parent_is_found_and_a_stranger_is_not() -> None:
    """The parent ends, the child has a new session and an empty environment: as Ray's agents, only worse."""
    family = ProcessFamily()
    orphan = (
        "import subprocess, time; subprocess.Popen(['sleep', '60'], env={}, start_new_session=True); time.sleep(60)"
    )
    with (
        subprocess.Popen([sys.executable, "-c", orphan], env={**os.environ, **family.variables}) as parent,
        subprocess.Popen(["sleep", "60"], env={MARK: "another federation's"}) as stranger,
    ):
        deadline = time.monotonic() + 10
        while len(family.alive()) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        parent.kill()
        parent.wait()
        assert len(family.alive()) == 1
        family.end()
        assert not family.alive()
        assert stranger.poll() is None
        stranger.kill()


def test_an_interrupt_while_stopping_still_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    family = ProcessFamily()
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", stubborn], env={**os.environ, **family.variables}, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        family._children["x"] = child

        def interrupted(*_: object) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(process_family, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            family.end()
        assert child.poll() is not None
