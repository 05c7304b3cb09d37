"""Start a study on this machine: check everything first, then run it and follow it live.

Nothing is spent, and no folder is made, before every file that a person wrote was read and found good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import FederationError, SiteConfigError, UserError
from common.models.embedder import EMBEDDERS
from common.models.location import check_base
from common.site.check import SiteCheck, check_site
from common.site.config import Site
from common.site.policy import check_study
from common.study import Study
from deploy.local import RESERVED_NAMES, LocalFederation, SiteProcess
from server.ledger_heads import LedgerHeads, state_folder
from server.progress import ProgressReader
from server.workspace import Workspace

Engine = Literal["simulation", "processes"]
OnEvent = Callable[[dict[str, object]], None]

FOLLOW_SECONDS = 0.5
STATUS_SECONDS = 20.0
"""Asking Flower for a run's status starts a process; events tell the normal end much earlier."""


@dataclass(frozen=True)
class Launch:
    """A study, its sites and its run folder, checked.

    Attributes
    ----------
    study_file, site_files
        Absolute paths.
    checks
        What each site's documents look like; for this machine's screen only.
    """

    study_file: Path
    study: Study
    site_files: Sequence[Path]
    sites: Sequence[Site]
    checks: Sequence[SiteCheck]
    workspace: Workspace


def prepare(study_file: Path, sites_folder: Path, out: Path) -> Launch:
    """Read and check the study and every site file of a folder.

    Raises
    ------
    UserError, PolicyRefusal
        One sentence about the first thing that can't work.
    """
    study = Study.load(study_file)
    _check_models(study)
    files = sorted(path.resolve() for path in sites_folder.glob("*.toml")) if sites_folder.is_dir() else []
    if not files:
        raise SiteConfigError(f"{sites_folder}: no site files (*.toml) there; one file per site is needed")
    sites = [Site.load(path) for path in files]
    names = [site.name for site in sites]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise SiteConfigError(f"{sites_folder}: two site files have the name {repeated[0]!r}; names must be distinct")
    if reserved := sorted(set(names) & set(RESERVED_NAMES)):
        raise SiteConfigError(f"{sites_folder}: a site can't be named {reserved[0]!r} here; any other name is accepted")
    checks = [check_site(site, study) for site in sites]
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: the run folder isn't empty; name a new one with --out")
    LedgerHeads(state_folder())
    for site in sites:
        # Last, since solving for the noise takes seconds: a promise that no noise keeps ends here, not at a hospital.
        check_study(site, study)
    return Launch(study_file.resolve(), study, files, sites, checks, Workspace(out.resolve()))


def execute(
    launch: Launch, engine: Engine, on_event: OnEvent, weak_environment: Path, strong_environment: Path
) -> None:
    """Run the study on this machine until its corpus is written.

    Parameters
    ----------
    engine
        'simulation' (Flower's engine: one process pool) or 'processes' (a real SuperLink with TLS and node keys, and
        one SuperNode per site).
    weak_environment, strong_environment
        ``bin`` folders of the Python environments that sites of each tier run in; for 'processes'.

    Raises
    ------
    FederationError
        If the run ended without a corpus, with the reason the coordinator's side gave.
    """
    launch.workspace.create()
    environments = {"weak": weak_environment, "strong": strong_environment}
    if engine == "simulation":
        federation = LocalFederation.simulation(launch.workspace.federation, len(launch.site_files))
    else:
        federation = LocalFederation.deployment(
            launch.workspace.federation,
            [
                SiteProcess(site.name, file, environments[site.tier])
                for site, file in zip(launch.sites, launch.site_files, strict=True)
            ],
        )
    with federation:
        run_id = federation.submit(
            {
                "study": str(launch.study_file),
                "workspace": str(launch.workspace.root),
                "coordinator-state": str(state_folder()),
                "simulated-sites": str(launch.site_files[0].parent) if engine == "simulation" else "",
            }
        )
        try:
            _follow(federation, run_id, launch.workspace, on_event)
        except KeyboardInterrupt:
            federation.stop_run(run_id)
            raise


def _follow(federation: LocalFederation, run_id: str, workspace: Workspace, on_event: OnEvent) -> None:
    reader = ProgressReader(workspace.progress)
    asked = time.monotonic()
    while True:
        for event in reader.new_events():
            on_event(event)
            if event["event"] == "finished":
                return
            if event["event"] == "failed":
                raise FederationError(f"the run ended without a corpus: {event['text']}")
        if time.monotonic() - asked > STATUS_SECONDS:
            asked = time.monotonic()
            _require_running(federation, run_id, workspace)
        time.sleep(FOLLOW_SECONDS)


def _require_running(federation: LocalFederation, run_id: str, workspace: Workspace) -> None:
    status = federation.status(run_id)
    if status.finished and not status.completed:
        raise FederationError(
            f"Flower ended the run ({status.status}) without a word from the ServerApp; see the logs in "
            f"{workspace.federation}"
        )


def _check_models(study: Study) -> None:
    if study.voting.embedder.partition(":")[0] not in EMBEDDERS:
        raise UserError(f"voting.embedder is {study.voting.embedder!r}; one of {sorted(EMBEDDERS)} is accepted")
    check_base(study.generator.base)
