"""A local federation refuses strangers, says what went wrong, and leaves no process behind."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import FederationError
from deploy.local import HOST, LocalFederation, SiteProcess
from tests.hospitals import rows, write_site

BIN = Path(sys.executable).parent


@pytest.mark.e2e
def test_an_unregistered_key_is_refused_and_nothing_is_left_running(tmp_path: Path) -> None:
    from deploy.certificates import make_certificates

    site = write_site(tmp_path, "east", "weak", rows(30))
    with LocalFederation.deployment(tmp_path / "work", [SiteProcess("east", site, BIN)]) as federation:
        stranger = make_certificates(tmp_path / "stranger", ["mallory"], ["localhost"])
        command = [str(BIN / "flower-supernode"), "--superlink", f"{HOST}:{federation._port}", "--port", "0"]
        command += ["--root-certificates", str(tmp_path / "work" / "certificates" / "ca.crt")]
        command += ["--auth-supernode-private-key", str(stranger.node_key("mallory"))]
        refused = subprocess.run(
            command, env=federation._variables("mallory", BIN), capture_output=True, text=True, check=False, timeout=60
        )
        assert refused.returncode != 0
        time.sleep(1)
        federation.require_alive()
        assert federation._marked()
    assert not federation._marked()


@pytest.mark.e2e
def test_a_process_that_dies_at_the_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    federation = LocalFederation.simulation(tmp_path / "work", 1)
    with socket.socket() as taken:
        taken.bind((HOST, federation._port))
        taken.listen()
        with pytest.raises(FederationError, match=r"superlink ended with exit code \d+"), federation:
            pass
    assert not federation._marked()


def test_no_process_phones_home_or_installs_anything(tmp_path: Path) -> None:
    variables = LocalFederation.simulation(tmp_path, 1)._variables("superlink", BIN)
    assert variables["FLWR_TELEMETRY_ENABLED"] == "0"
    assert variables["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert variables["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert variables["RAY_USAGE_STATS_ENABLED"] == "0"


def test_an_environment_without_flower_is_named(tmp_path: Path) -> None:
    federation = LocalFederation.deployment(tmp_path / "work", [])
    federation._environment = tmp_path
    with pytest.raises(FederationError, match="flower-superlink: not there"), federation:
        pass
