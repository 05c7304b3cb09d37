"""A local federation carries messages, refuses strangers, says what went wrong, and leaves no process behind."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.errors import FederationError
from deploy import local
from deploy.certificates import make_certificates
from deploy.local import HOST, LocalFederation, SiteProcess

BIN = Path(sys.executable).parent

WORD = 'two "quoted"  words = x \\\\ \N{GRINNING FACE}'
"""What Flower's command line would take apart."""

ECHO_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "echo"
version = "0.0.1"
dependencies = []

[tool.flwr.app]
publisher = "tests"
fab-include = ["pyproject.toml", "echo_app.py"]

[tool.flwr.app.components]
serverapp = "echo_app:server"
clientapp = "echo_app:client"

[tool.flwr.app.config]
word = ""
sites = ""
out = ""
"""

ECHO_APP = """
import json, os, sys, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

@client.query("echo")
def echo(message, context):
    said = {
        "word": message.content["config"]["word"],
        "setting": context.run_config["word"],
        "site": str(context.node_config.get("site", "")),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "python": sys.prefix,
    }
    return Message(RecordDict({"config": ConfigRecord(said)}), reply_to=message)

@server.main()
def main(grid, context):
    settings = context.run_config
    if not settings["out"]:
        raise RuntimeError("told to fail")
    deadline = time.monotonic() + 30
    while len(list(grid.get_node_ids())) < int(settings["sites"]) and time.monotonic() < deadline:
        time.sleep(0.2)
    content = RecordDict({"config": ConfigRecord({"word": settings["word"]})})
    messages = [Message(content, dst_node_id=node, message_type="query.echo") for node in grid.get_node_ids()]
    replies = [dict(reply.content["config"]) for reply in grid.send_and_receive(messages, timeout=40)]
    part = Path(settings["out"] + ".part")
    part.write_text(json.dumps(replies))
    part.rename(settings["out"])
"""


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    app = tmp_path / "an app" / "echo"
    app.mkdir(parents=True)
    (app / "pyproject.toml").write_text(ECHO_PROJECT)
    (app / "echo_app.py").write_text(ECHO_APP)
    return app


def _ask(federation: LocalFederation, out: Path, sites: int) -> list[dict[str, Any]]:
    run_id = federation.submit({"word": WORD, "sites": str(sites), "out": str(out)})
    _wait_for_end(federation, run_id, "finished:completed")
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def _wait_for_end(federation: LocalFederation, run_id: str, expected: str) -> None:
    deadline = time.monotonic() + 50
    while not (status := federation.status(run_id)).finished and time.monotonic() < deadline:
        time.sleep(1)
    assert status.status == expected, federation.log_tail()
    assert status.completed == (expected == "finished:completed")


@contextmanager
def _leaving_nothing(federation: LocalFederation) -> Iterator[LocalFederation]:
    """Enter it, and check afterwards every process that was seen to descend from its own."""
    with federation:
        yield federation
        seen = federation._processes.alive()
        assert seen
    assert not federation._processes.alive()
    left = [process for process in seen if _started(process.pid) == process.started]
    assert not left, [Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in left]


def _started(pid: int) -> int | None:
    """Start time of a process that runs; read here anew, not with the code that is tested."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _supernode(federation: LocalFederation, certificate: Path, key: Path, log: Path) -> tuple[int, str]:
    """Exit code and log of a SuperNode with this key; to a file, since its executor outlives it and holds a pipe."""
    command = [str(BIN / "flower-supernode"), "--superlink", f"{HOST}:{federation._port}"]
    command += ["--port", str(local._free_port()), "--max-wait-time", "5", "--root-certificates", str(certificate)]
    command += ["--auth-supernode-private-key", str(key)]
    environment = federation._variables("mallory", BIN)
    with log.open("wb") as output:
        ended = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False, timeout=40)
    return ended.returncode, log.read_text()


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_deployment_carries_messages_over_tls_and_refuses_strangers(
    tmp_path: Path, echo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sites = [SiteProcess(name, tmp_path / f"{name} site.toml", BIN) for name in ("east", "west")]
    with _leaving_nothing(LocalFederation.deployment(tmp_path / "work", sites, app=echo)) as federation:
        replies = _ask(federation, tmp_path / "out.json", 2)
        assert {reply["site"] for reply in replies} == {str(site.site_file) for site in sites}
        assert {reply["word"] for reply in replies} == {reply["setting"] for reply in replies} == {WORD}
        assert {reply["threads"] for reply in replies} == {"1"}
        assert {reply["python"] for reply in replies} == {sys.prefix}

        address = f"{HOST}:{federation._port}/health"
        authority = tmp_path / "work" / "certificates" / "ca.crt"
        trusted = ssl.create_default_context(cafile=str(authority))
        assert urllib.request.urlopen(f"https://{address}", context=trusted, timeout=5).status == 200
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"https://{address}", context=ssl.create_default_context(), timeout=5)
        with pytest.raises(OSError, match=r".*"):
            urllib.request.urlopen(f"http://{address}", timeout=5)

        stranger = make_certificates(tmp_path / "stranger", ["mallory"], ["localhost"])
        code, log = _supernode(federation, authority, stranger.node_key("mallory"), tmp_path / "mallory.log")
        assert code != 0
        assert "exit-codes/305" in log, log
        assert "SuperNode ID" not in log
        federation.require_alive()


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_simulation_carries_messages_and_takes_rays_processes_with_it(
    tmp_path: Path, echo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    with _leaving_nothing(LocalFederation.simulation(tmp_path / "work", 2, app=echo)) as federation:
        out = tmp_path / "out.json"
        run_id = federation.submit({"word": WORD, "sites": "2", "out": str(out)})
        deadline = time.monotonic() + 50
        while not out.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        replies = json.loads(out.read_text())
        assert [reply["word"] for reply in replies] == [reply["setting"] for reply in replies] == [WORD, WORD]
        titles = {Path(f"/proc/{process.pid}/comm").read_text().strip() for process in federation._processes.alive()}
        assert {"raylet", "gcs_server"} <= titles
        assert any(title.startswith("ray::Dash") for title in titles), "an agent that overwrote its environment"
        assert run_id


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_failed_run_is_not_taken_for_a_completed_one(tmp_path: Path, echo: Path) -> None:
    with _leaving_nothing(LocalFederation.deployment(tmp_path / "work", [], app=echo)) as federation:
        with pytest.raises(FederationError, match=r"(?s)settings \['unknown-key'\].*Invalid run config"):
            federation.submit({"unknown-key": ""})
        run_id = federation.submit({"out": ""})
        _wait_for_end(federation, run_id, "finished:failed")
        federation.stop_run(run_id)
        with pytest.raises(FederationError, match="'12345'"):
            federation.status("12345")


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_site_that_is_not_let_in_is_named_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFederation, "_register", lambda *_: None)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "east.log").write_text("SuperNode ID: 1, of an earlier federation\n")
    federation = LocalFederation.deployment(tmp_path / "work", [SiteProcess("east", tmp_path / "east.toml", BIN)])
    with pytest.raises(FederationError, match=r"(?s)site 'east' ended with exit code \d+:\n.+"), federation:
        pass
    assert not federation._processes.alive()


@pytest.mark.e2e
def test_a_process_that_dies_at_the_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    federation = LocalFederation.simulation(tmp_path / "work", 1)
    with socket.socket() as taken:
        taken.bind((HOST, federation._port))
        taken.listen()
        with pytest.raises(FederationError, match=r"superlink ended with exit code \d+"), federation:
            pass
    assert not federation._processes.alive()


def test_no_process_phones_home_or_installs_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    variables = LocalFederation.simulation(tmp_path, 1)._variables("superlink", BIN)
    assert variables["FLWR_TELEMETRY_ENABLED"] == "0"
    assert variables["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert variables["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert variables["RAY_USAGE_STATS_ENABLED"] == "0"
    assert variables["HF_HUB_OFFLINE"] == "1"
    assert variables["OMP_WAIT_POLICY"] == "ACTIVE", "the caller's wish"
    assert variables["PATH"].split(os.pathsep)[0] == str(BIN)
    assert "PYTHONPATH" not in variables


def test_an_environment_without_flower_is_named(tmp_path: Path) -> None:
    federation = LocalFederation.deployment(tmp_path / "work", [])
    federation._environment = tmp_path
    with pytest.raises(FederationError, match="flower-superlink: not there"), federation:
        pass


@pytest.mark.parametrize("names", [["east", "east"], ["superlink"], ["cli"]])
def test_a_name_that_would_overwrite_anothers_files_is_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(FederationError, match=repr(names[0])):
        LocalFederation.deployment(tmp_path, [SiteProcess(name, tmp_path / "site.toml", BIN) for name in names])


def test_a_federation_that_was_not_started_says_so(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="with statement"):
        LocalFederation.simulation(tmp_path, 1).submit({})
    with pytest.raises(FederationError, match="at least 1"):
        LocalFederation.simulation(tmp_path, 0)
