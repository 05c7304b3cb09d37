"""A federation on one machine: a real SuperLink with one SuperNode process per site, or Flower's simulation engine.

Flower 1.42 serves everything on one HTTP port. What this module guards against, seen to happen or read in its
source: the managed local SuperLink may run another folder's code, so ours starts from a folder of its own; ``flwr``
exits 0 on failed runs, so status is asked for; dependencies would be installed at run time; telemetry is on by default;
a quote in a setting on the command line isn't understood, so settings go through files; Ray joins a cluster that
``ray start`` left on the machine, and its agents overwrite their own environment, so that no marker there tells whose
they are.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
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
from deploy.process_family import ProcessFamily

HOST = "127.0.0.1"
CONNECTION = "local-federation"
SUPERLINK = "superlink"

START_SECONDS = 90.0
COMMAND_SECONDS = 120.0
LOG_TAIL = 3000

RESERVED_NAMES = ("superlink", "cli", "server")
"""Names of our own folders, logs and keys, which a site's would overwrite."""

_NODE_IS_ONLINE = b"SuperNode ID:"
"""What a SuperNode logs once the SuperLink has let it in. Asking the SuperLink would start a process each time."""

_DROPPED = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")

_FORCED = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A cluster of its own, whatever the caller's environment or the machine offers: notes must not go to another's.
    "RAY_ADDRESS": "local",
    "RAY_DISABLE_MEMORY_MONITOR": "1",
    "RAY_memory_monitor_refresh_ms": "0",
}

_PREFERRED = {
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
        self._app = app.resolve() if app else None
        self._environment = Path(sys.executable).parent
        self._port = _free_port()
        self._processes = ProcessFamily()
        self._log_starts: dict[str, int] = {}
        self._certificates: Certificates | None = None

    @classmethod
    def simulation(
        cls, work: Path, number_of_sites: int, client_cpus: int = 1, app: Path | None = None
    ) -> LocalFederation:
        """Flower's simulation engine with this many sites, each using ``client_cpus`` cores while it works.

        Parameters
        ----------
        work
            Folder for logs, keys and Flower's settings.
        app
            Folder of the Flower app to submit; fedcorpus' own, staged anew, by default.
        """
        if number_of_sites < 1:
            raise FederationError(f"number_of_sites is {number_of_sites}; at least 1 is needed")
        return cls(work, (), number_of_sites, client_cpus, app)

    @classmethod
    def deployment(cls, work: Path, sites: Sequence[SiteProcess], app: Path | None = None) -> LocalFederation:
        """A SuperLink with TLS and node authentication on the loopback interface, and one SuperNode per site.

        Parameters are those of `simulation`.
        """
        names = [site.name for site in sites]
        for name in names:
            if name in RESERVED_NAMES or names.count(name) > 1:
                raise FederationError(
                    f"a site can't be named {name!r} here; a name that no other site has is needed, "
                    f"and none of {RESERVED_NAMES}"
                )
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
        self._require_alive(SUPERLINK)
        app = self._app or stage_app(Path(tempfile.mkdtemp(prefix="app-", dir=self._work)))
        arguments = ["run", str(app), CONNECTION, "--format", "json"]
        if run_config:
            settings = _write_settings(self._home("cli") / "run.toml", run_config)
            arguments += ["--run-config", str(settings)]
        if self._simulated:
            resources = f"num-supernodes={self._simulated} client-resources-num-cpus={self._client_cpus}"
            arguments += ["--federation-config", resources]
        answer = self._flwr(*arguments)
        if not answer.get("success") or not answer.get("run-id"):
            # Flower says that a setting is unknown, but not which one.
            raise FederationError(f"flwr run was refused, with settings {sorted(run_config)}: {_reason(answer)}")
        return str(answer["run-id"])

    def status(self, run_id: str) -> RunStatus:
        """Ask Flower for a run's status. It starts a process: more than once in a few seconds is a waste.

        Raises
        ------
        FederationError
            If the SuperLink is gone or doesn't know the run.
        """
        self._require_alive(SUPERLINK)
        answer = self._flwr("list", CONNECTION, "--run-id", run_id, "--format", "json")
        runs = answer.get("runs")
        if not runs:
            raise FederationError(f"flwr list knows no run {run_id!r}: {_reason(answer)}")
        return RunStatus(str(runs[0]["status"]))

    def stop_run(self, run_id: str) -> None:
        """Ask Flower to stop a run; a client that is computing goes on to its end. One that is over stays so.

        Raises
        ------
        FederationError
            If the run goes on.
        """
        self._require_alive(SUPERLINK)
        answer = self._flwr("stop", run_id, CONNECTION, "--format", "json")
        if not answer.get("success") and not self.status(run_id).finished:
            raise FederationError(f"flwr stop didn't stop run {run_id!r}: {_reason(answer)}")

    def log_tail(self, name: str = SUPERLINK) -> str:
        """Last lines of a process' log: 'superlink' or a site's name."""
        path = self._log(name)
        return path.read_bytes()[-LOG_TAIL:].decode(errors="replace") if path.exists() else ""

    def require_alive(self) -> None:
        """Raise FederationError if a process that should run has ended, naming it and its last lines."""
        for name in self._processes.names:
            self._require_alive(name)

    def stop(self) -> None:
        """End every process that this federation started, and their children."""
        self._processes.end()

    def _start(self) -> None:
        self._work.mkdir(parents=True, exist_ok=True)
        arguments = ["--host", HOST, "--port", str(self._port)]
        if self._simulated:
            arguments += ["--insecure", "--simulation"]
        else:
            names = [site.name for site in self._sites]
            identity = make_certificates(self._work / "certificates", names, ["localhost", HOST])
            arguments += ["--ssl-ca-certfile", str(identity.authority), "--ssl-certfile", str(identity.server)]
            arguments += ["--ssl-keyfile", str(identity.server_key), "--enable-supernode-auth"]
            self._certificates = identity
        self._spawn(SUPERLINK, self._environment, ["flower-superlink", *arguments])
        self._wait_until_healthy()
        self._write_connection()
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(self._admit, self._sites))
        self._wait_until_online()

    def _admit(self, site: SiteProcess) -> None:
        self._register(site)
        self._start_node(site)

    def _register(self, site: SiteProcess) -> None:
        key = self._identity.node_public_key(site.name)
        answer = self._flwr("supernode", "register", str(key), CONNECTION, "--name", site.name, "--format", "json")
        if not answer.get("success"):
            raise FederationError(f"flwr supernode register refused site {site.name!r}: {_reason(answer)}")

    def _start_node(self, site: SiteProcess) -> None:
        arguments = ["--superlink", f"{HOST}:{self._port}", "--port", str(_free_port())]
        arguments += ["--root-certificates", str(self._identity.authority)]
        arguments += ["--auth-supernode-private-key", str(self._identity.node_key(site.name))]
        node = _write_settings(self._home(site.name) / "node.toml", {"site": str(site.site_file.resolve())})
        arguments += ["--node-config", str(node)]
        self._spawn(site.name, site.environment, ["flower-supernode", *arguments])

    def _spawn(self, name: str, environment: Path, command: Sequence[str]) -> None:
        executable = environment / command[0]
        if not executable.is_file():
            raise FederationError(f"{executable}: not there; {name!r} needs an environment with fedcorpus installed")
        with self._open_log(name) as log:
            self._log_starts[name] = log.tell()
            variables = self._variables(name, environment)
            self._processes.start(name, [str(executable), *command[1:]], log, self._home(name), variables)

    def _variables(self, name: str, environment: Path) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in _DROPPED}
        own = {
            "FLWR_HOME": str(self._home(name)),
            "PATH": f"{environment}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        return {**_PREFERRED, **kept, **_FORCED, **own, **self._processes.variables}

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
        security = "insecure = true"
        if self._certificates:
            security = f"root-certificates = {_toml_string(str(self._certificates.authority))}"
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

    def _wait_until_online(self) -> None:
        """A site that can't come in is named here, not by a census that waits for it in vain."""
        deadline = time.monotonic() + START_SECONDS
        waiting = [site.name for site in self._sites]
        while waiting and time.monotonic() < deadline:
            time.sleep(0.2)
            self.require_alive()
            waiting = [name for name in waiting if not self._is_online(name)]
        if waiting:
            raise FederationError(
                f"site {waiting[0]!r} isn't online after {START_SECONDS:.0f} s:\n{self.log_tail(waiting[0])}"
            )

    def _is_online(self, name: str) -> bool:
        # The folder may hold the log of an earlier federation.
        return _NODE_IS_ONLINE in self._log(name).read_bytes()[self._log_starts[name] :]

    def _require_alive(self, name: str) -> None:
        if name not in self._processes.names:
            raise FederationError(f"{name!r} isn't running; use the federation in a with statement")
        if (code := self._processes.exit_code(name)) is not None:
            raise FederationError(f"{self._title(name)} ended with exit code {code}:\n{self.log_tail(name)}")

    def _title(self, name: str) -> str:
        return name if name == SUPERLINK else f"site {name!r}"

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """Run a ``flwr`` command and read its JSON. Its exit code isn't trusted: it is 0 for some failures."""
        try:
            finished = subprocess.run(
                [str(self._environment / "flwr"), *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd=self._home("cli"),
                env=self._variables("cli", self._environment),
                timeout=COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise FederationError(
                f"flwr {arguments[0]} gave no answer within {COMMAND_SECONDS:.0f} s; the SuperLink's log ends:\n"
                f"{self.log_tail()}"
            ) from error
        output = finished.stdout.decode(errors="replace")
        answer = _json_in(output)
        if answer is None:
            errors = finished.stderr.decode(errors="replace")
            raise FederationError(f"flwr {arguments[0]} gave no answer: {(output + errors).strip()[-LOG_TAIL:]}")
        return answer


def _json_in(output: str) -> dict[str, Any] | None:
    """The JSON object that a ``flwr`` command prints, perhaps after other lines."""
    try:
        answer = json.loads(output[output.index("{") :])
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None


def _reason(answer: Mapping[str, Any]) -> str:
    return str(answer.get("error-message", answer)).strip()


def _write_settings(path: Path, settings: Mapping[str, str]) -> Path:
    """Write settings as TOML: a quote within a value isn't understood on Flower's command line."""
    lines = [f"{key} = {_toml_string(value)}\n" for key, value in settings.items()]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _toml_string(text: str) -> str:
    """A TOML basic string: JSON's, apart from surrogate pairs and the delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
