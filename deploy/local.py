"""A federation on one machine: a real SuperLink with one SuperNode process per site, or Flower's simulation engine.

Flower 1.42 serves everything on one HTTP port. What this module guards against, all of it seen to happen: the managed
local SuperLink may run another folder's code, so ours starts from a folder of its own; ``flwr`` exits 0 on failed runs,
so status is asked for; dependencies would be installed at run time; and telemetry is on by default.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from common.errors import FederationError
from deploy.app import stage_app
from deploy.certificates import Certificates, make_certificates

HOST = "127.0.0.1"
CONNECTION = "local-federation"
SUPERLINK = "superlink"

START_SECONDS = 90.0
STOP_SECONDS = 10.0
COMMAND_SECONDS = 120.0
LOG_TAIL = 3000

_MARKER = "FEDCORPUS_FEDERATION"
"""In the environment of all processes we start, and so of their children: how `stop` finds those with new sessions."""

_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_MEMORY_MONITOR": "1",
    "RAY_memory_monitor_refresh_ms": "0",
    # Threads that wait must sleep, not spin: several sites share this machine's cores, and spinning costs them all.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class SiteProcess:
    """One site of a deployment.

    Attributes
    ----------
    name
        Name under which its node key is registered.
    site_file
        Its ``site.toml``.
    environment
        ``bin`` folder of the Python environment it runs in; a weak site's needs no torch.
    """

    name: str
    site_file: Path
    environment: Path


@dataclass(frozen=True)
class RunStatus:
    """Flower's word on a run, e.g. ``running`` or ``finished:completed``."""

    status: str

    @property
    def finished(self) -> bool:
        """Whether it is over, well or not."""
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        """Whether it is over and went well."""
        return self.status == "finished:completed"


class LocalFederation:
    """Processes of one federation; a context manager that starts them and ends only them.

    Make one with `simulation` or `deployment`.
    """

    def __init__(
        self, work: Path, sites: Sequence[SiteProcess], simulated: int, client_cpus: int, app: Path | None
    ) -> None:
        self._work = work.resolve()
        self._sites = sites
        self._simulated = simulated
        self._client_cpus = client_cpus
        self._app = app
        self._environment = Path(sys.executable).parent
        self._port = _free_port()
        self._marker = secrets.token_hex(16)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._certificates: Certificates | None = None

    @classmethod
    def simulation(
        cls, work: Path, number_of_sites: int, client_cpus: int = 1, app: Path | None = None
    ) -> LocalFederation:
        """Flower's simulation engine with this many sites, each using ``client_cpus`` cores while it works."""
        return cls(work, (), number_of_sites, client_cpus, app)

    @classmethod
    def deployment(cls, work: Path, sites: Sequence[SiteProcess], app: Path | None = None) -> LocalFederation:
        """A SuperLink with TLS and node authentication on the loopback interface, and one SuperNode per site."""
        return cls(work, tuple(sites), 0, 1, app)

    def __enter__(self) -> LocalFederation:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def submit(self, run_config: Mapping[str, str]) -> str:
        """Start a run of the app with these settings; returns Flower's run id.

        Raises
        ------
        FederationError
            If Flower refuses it.
        """
        app = self._app or stage_app(self._work / "app")
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in run_config.items())
        arguments = ["run", str(app), CONNECTION, "--format", "json"]
        if settings:
            arguments += ["--run-config", settings]
        if self._simulated:
            resources = f"num-supernodes={self._simulated} client-resources-num-cpus={self._client_cpus}"
            arguments += ["--federation-config", resources]
        answer = self._flwr(*arguments)
        if not answer.get("success") or "run-id" not in answer:
            raise FederationError(f"flwr run was refused: {answer.get('error-message', answer)}")
        return str(answer["run-id"])

    def status(self, run_id: str) -> RunStatus:
        """Ask Flower for a run's status."""
        runs = self._flwr("list", CONNECTION, "--run-id", run_id, "--format", "json").get("runs", [])
        if not runs:
            raise FederationError(f"flwr list knows no run {run_id}")
        return RunStatus(str(runs[0]["status"]))

    def stop_run(self, run_id: str) -> None:
        """Ask Flower to stop a run; a client that is computing goes on to its end."""
        self._flwr("stop", run_id, CONNECTION, "--format", "json")

    def log_tail(self, name: str = SUPERLINK) -> str:
        """Last lines of a process' log: 'superlink' or a site's name."""
        path = self._log(name)
        return path.read_bytes()[-LOG_TAIL:].decode(errors="replace") if path.exists() else ""

    def require_alive(self) -> None:
        """Raise FederationError if a process that should run has ended, naming it and its last lines."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise FederationError(f"{name} ended with exit code {process.returncode}:\n{self.log_tail(name)}")

    def stop(self) -> None:
        """End every process that this federation started, and their children; first gently, then for good."""
        for process in reversed(self._processes.values()):
            _signal(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            _wait(process, deadline)
        # Ray's and Flower's children have sessions of their own: our marker in their environment tells they're ours.
        while (left := self._marked()) and time.monotonic() < deadline:
            for pid in left:
                _signal(pid, signal.SIGTERM)
            time.sleep(0.2)
        for pid in self._marked():
            _signal(pid, signal.SIGKILL)
        for process in self._processes.values():
            _wait(process, time.monotonic() + STOP_SECONDS)

    def _start(self) -> None:
        self._work.mkdir(parents=True, exist_ok=True)
        arguments = ["--host", HOST, "--port", str(self._port)]
        if self._simulated:
            arguments += ["--insecure", "--simulation"]
        else:
            names = [site.name for site in self._sites]
            identity = make_certificates(self._work / "certificates", names, ["localhost", HOST])
            arguments += [
                "--ssl-ca-certfile",
                str(identity.authority),
                "--ssl-certfile",
                str(identity.server),
            ]
            arguments += ["--ssl-keyfile", str(identity.server_key), "--enable-supernode-auth"]
            self._certificates = identity
        self._spawn(SUPERLINK, self._environment, ["flower-superlink", *arguments])
        self._wait_until_healthy()
        self._write_connection()
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(self._register, self._sites))
        for site in self._sites:
            self._start_node(site)
        self.require_alive()

    def _register(self, site: SiteProcess) -> None:
        key = self._identity.node_public_key(site.name)
        answer = self._flwr("supernode", "register", str(key), CONNECTION, "--name", site.name, "--format", "json")
        if not answer.get("success", True):
            raise FederationError(f"flwr supernode register refused {site.name}: {answer}")

    def _start_node(self, site: SiteProcess) -> None:
        arguments = ["--superlink", f"{HOST}:{self._port}", "--port", str(_free_port())]
        arguments += ["--root-certificates", str(self._identity.authority)]
        arguments += ["--auth-supernode-private-key", str(self._identity.node_key(site.name))]
        arguments += ["--node-config", f"site={json.dumps(str(site.site_file.resolve()))}"]
        self._spawn(site.name, site.environment, ["flower-supernode", *arguments])

    def _spawn(self, name: str, environment: Path, command: Sequence[str]) -> None:
        executable = environment / command[0]
        if not executable.is_file():
            raise FederationError(f"{executable}: not there; {name} needs an environment with fedcorpus installed")
        with self._open_log(name) as log:
            self._processes[name] = subprocess.Popen(
                [str(executable), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._home(name),
                env=self._variables(name, environment),
                start_new_session=True,
            )

    def _variables(self, name: str, environment: Path) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
        own = {
            "FLWR_HOME": str(self._home(name)),
            "PATH": f"{environment}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        return kept | _QUIET | own | {_MARKER: self._marker}

    def _home(self, name: str) -> Path:
        """A folder of its own for each process: Flower's settings, and a working folder with no code in it."""
        home = self._work / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _log(self, name: str) -> Path:
        return self._work / f"{name}.log"

    def _open_log(self, name: str) -> BinaryIO:
        return self._log(name).open("ab")

    @property
    def _identity(self) -> Certificates:
        if self._certificates is None:
            raise FederationError("a simulation has no certificates; only a deployment has")
        return self._certificates

    def _write_connection(self) -> None:
        security = (
            f"root-certificates = {json.dumps(str(self._certificates.authority))}"
            if self._certificates
            else "insecure = true"
        )
        (self._home("cli") / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{HOST}:{self._port}"\n{security}\n',
            encoding="utf-8",
        )

    def _wait_until_healthy(self) -> None:
        secure = self._certificates is not None
        context = ssl.create_default_context(cafile=str(self._certificates.authority)) if self._certificates else None
        url = f"http{'s' if secure else ''}://{HOST}:{self._port}/health"
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.require_alive()
            try:
                opener.open(url, timeout=2).close()
                return
            except OSError:
                time.sleep(0.2)
        raise FederationError(f"the SuperLink isn't up after {START_SECONDS:.0f} s:\n{self.log_tail()}")

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """Run a ``flwr`` command and read its JSON. Its exit code isn't trusted: it is 0 for some failures."""
        finished = subprocess.run(
            [str(self._environment / "flwr"), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=self._home("cli"),
            env=self._variables("cli", self._environment),
            timeout=COMMAND_SECONDS,
            check=False,
        )
        output = finished.stdout.decode(errors="replace")
        start = output.find("{")
        try:
            answer = json.loads(output[start:]) if start >= 0 else None
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            errors = finished.stderr.decode(errors="replace")
            raise FederationError(f"flwr {arguments[0]} gave no answer: {(output + errors).strip()[-LOG_TAIL:]}")
        return answer

    def _marked(self) -> list[int]:
        """Processes that carry our marker, this one apart."""
        wanted = f"{_MARKER}={self._marker}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (entry / "environ").read_bytes() and (entry / "stat").read_text().split(") ")[1][0] != "Z":
                    found.append(int(entry.name))
            except (OSError, IndexError):
                continue
        return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return
