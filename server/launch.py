"""Start a study on this machine: check everything first, then run it and follow it live.

Nothing is spent, and no folder is made, before every file that a person wrote was read and found good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import CheckpointError, FederationError, SiteConfigError, UserError
from common.models.embedder import EMBEDDERS, is_embedder, load_embedder
from common.models.location import check_base
from common.site.check import SiteCheck, check_site
from common.site.config import Site
from common.site.policy import check_study
from common.study import Study
from deploy.local import RESERVED_NAMES, LocalFederation, SiteProcess
from server.aggregate import needs_embeddings
from server.ledger_heads import LedgerHeads, state_folder
from server.progress import ProgressReader
from server.workspace import Workspace, write_atomically

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
    engine
        'simulation' (Flower's engine: one process pool) or 'processes' (a real SuperLink with TLS and node keys, and
        one SuperNode per site).
    weak_environment, strong_environment
        ``bin`` folders of the Python environments that sites of each tier run in; for 'processes'.
    resumes
        Whether the run was left before it was finished, and goes on.
    """

    study_file: Path
    study: Study
    site_files: Sequence[Path]
    sites: Sequence[Site]
    checks: Sequence[SiteCheck]
    workspace: Workspace
    engine: Engine
    weak_environment: Path
    strong_environment: Path
    resumes: bool = False


class _Start(BaseModel):
    """``launch.json``: how a run was started, so that it can go on the same way."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sites: Path
    engine: Engine
    weak_environment: Path
    strong_environment: Path


def prepare(
    study_file: Path, sites_folder: Path, out: Path, engine: Engine, weak_environment: Path, strong_environment: Path
) -> Launch:
    """Read and check the study and every site file of a folder, for a new run in ``out``.

    Raises
    ------
    UserError, PolicyRefusal
        One sentence about the first thing that can't work.
    """
    study = Study.load(study_file)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: the run folder isn't empty; name a new one with --out")
    start = _Start(
        sites=sites_folder.resolve(),
        engine=engine,
        weak_environment=weak_environment,
        strong_environment=strong_environment,
    )
    return _checked(study, study_file.resolve(), Workspace(out.resolve()), start, resumes=False)


def prepare_resume(run: Path) -> Launch:
    """Read and check a run that was left before it was finished, and the sites that it was started with.

    Raises
    ------
    CheckpointError
        If no such run is there, or its state is damaged.
    UserError, PolicyRefusal
        One sentence about the first thing that can't work.
    FederationError
        If it is going on.
    """
    from server.checkpoint import held, read_checkpoint, read_identity, read_unfinished

    workspace = Workspace(run.resolve())
    study = read_unfinished(workspace)
    with held(workspace):
        read_identity(workspace)
        read_checkpoint(workspace, study)
    try:
        start = _Start.model_validate_json(workspace.launch.read_bytes())
    except (OSError, ValidationError) as cause:
        raise CheckpointError(f"{workspace.launch}: how the run was started can't be read; it can't go on") from cause
    return _checked(study, workspace.study, workspace, start, resumes=True)


def _checked(study: Study, study_file: Path, workspace: Workspace, start: _Start, *, resumes: bool) -> Launch:
    _check_models(study)
    sites_folder = start.sites
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
    LedgerHeads(state_folder())
    for site in sites:
        # Last, since solving for the noise takes seconds: a promise that no noise keeps ends here, not at a hospital.
        check_study(site, study)
    return Launch(
        study_file,
        study,
        files,
        sites,
        checks,
        workspace,
        start.engine,
        start.weak_environment,
        start.strong_environment,
        resumes,
    )


def execute(launch: Launch, on_event: OnEvent) -> None:
    """Run the study on this machine until its corpus is written.

    Raises
    ------
    FederationError
        If the run ended without a corpus, with the reason the coordinator's side gave.
    """
    workspace = launch.workspace.create()
    if not launch.resumes:
        start = _Start(
            sites=launch.site_files[0].parent,
            engine=launch.engine,
            weak_environment=launch.weak_environment,
            strong_environment=launch.strong_environment,
        )
        write_atomically(workspace.launch, start.model_dump_json(indent=1).encode())
    place = workspace.new_federation()
    environments = {"weak": launch.weak_environment, "strong": launch.strong_environment}
    if launch.engine == "simulation":
        federation = LocalFederation.simulation(place, len(launch.site_files))
    else:
        federation = LocalFederation.deployment(
            place,
            [
                SiteProcess(site.name, file, environments[site.tier])
                for site, file in zip(launch.sites, launch.site_files, strict=True)
            ],
        )
    reader = ProgressReader(workspace.progress, skip=True)
    with federation:
        run_id = federation.submit(
            {
                "study": str(launch.study_file),
                "workspace": str(workspace.root),
                "coordinator-state": str(state_folder()),
                "simulated-sites": str(launch.site_files[0].parent) if launch.engine == "simulation" else "",
                "resume": "yes" if launch.resumes else "",
            }
        )
        try:
            _follow(federation, run_id, reader, place, on_event)
        except KeyboardInterrupt:
            federation.stop_run(run_id)
            raise


def _follow(federation: LocalFederation, run_id: str, reader: ProgressReader, place: Path, on_event: OnEvent) -> None:
    asked = time.monotonic()
    while True:
        for event in reader.new_events():
            on_event(event)
            if event["event"] == "finished":
                return
            if event["event"] == "failed":
                raise FederationError(f"the run ended without a corpus: {event['text']}; {_how_to_go_on(place)}")
        if time.monotonic() - asked > STATUS_SECONDS:
            asked = time.monotonic()
            _require_running(federation, run_id, place)
        time.sleep(FOLLOW_SECONDS)


def _how_to_go_on(place: Path) -> str:
    return f"'fedcorpus resume {place.parent}' goes on from where it was"


def _require_running(federation: LocalFederation, run_id: str, place: Path) -> None:
    status = federation.status(run_id)
    if status.finished and not status.completed:
        raise FederationError(
            f"Flower ended the run ({status.status}) without a word from the ServerApp; see the logs in {place}; "
            f"{_how_to_go_on(place)}"
        )


def _check_models(study: Study) -> None:
    if not is_embedder(study.voting.embedder):
        raise UserError(f"voting.embedder is {study.voting.embedder!r}; one of {sorted(EMBEDDERS)} is accepted")
    if needs_embeddings(study.corpus.selection, study.corpus.smoothing):
        # The coordinator embeds the pool after the vote: what is missing is told now, before anything is spent.
        load_embedder(study.voting)
    check_base(study.generator.base)
