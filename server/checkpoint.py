"""Where a run stands, on disk: what `fedcorpus resume` needs to go on without asking a site for anything twice.

A run keeps its name for life: a site's ledger knows a run by it, and answers what it has answered before with the same
bytes. So it is written before any site is asked. After each round follow the adapter, bit for bit, as a round that was
broken off is asked again with the very same one; the server optimiser's moments; the profiles; and what is known of
the sites. The pool, the profiles and the ballots have files of their own. All of it is public or noised.
"""

from __future__ import annotations

import fcntl
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.configuration import first_problem
from common.errors import CheckpointError, FederationError
from common.protocol import Adapter
from common.study import Study
from server.known_site import KnownSite
from server.strategies.aggregation import RoundReport
from server.workspace import Workspace, write_atomically

FORMAT = 1

Profile = NDArray[np.int64]


class _Head(BaseModel):
    """What a checkpoint holds beside arrays."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    study_sha256: str
    round: int = Field(ge=0)
    sites: tuple[KnownSite, ...]
    reports: tuple[RoundReport, ...]


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands.

    Attributes
    ----------
    round
        Finished rounds.
    adapter
        After that round; empty before the first.
    optimizer
        State of the server's optimiser.
    profiles
        Noisy profile of each strong site that answered so far, int64 ``(codes,)``.
    sites
        All sites that were heard of.
    reports
        Of the finished rounds.
    """

    round: int = 0
    adapter: Adapter = field(default_factory=dict)
    optimizer: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    sites: Sequence[KnownSite] = ()
    reports: Sequence[RoundReport] = ()


def write_checkpoint(workspace: Workspace, study: Study, checkpoint: Checkpoint) -> None:
    """Replace the run's checkpoint, durably: a crash leaves the old one or the new one."""
    head = _Head(
        format=FORMAT,
        study_sha256=study.sha256,
        round=checkpoint.round,
        sites=tuple(checkpoint.sites),
        reports=tuple(checkpoint.reports),
    )
    # Names of parameters and sites are data here, not members of the archive, some of which numpy takes for its own.
    named = [
        (kind, name, array)
        for kind in ("adapter", "optimizer", "profiles")
        for name, array in getattr(checkpoint, kind).items()
    ]
    members = {f"a{number}": array for number, (_, _, array) in enumerate(named)}
    index = json.dumps({"head": head.model_dump(mode="json"), "arrays": [[kind, name] for kind, name, _ in named]})
    buffer = io.BytesIO()
    np.savez(buffer, index=np.frombuffer(index.encode(), dtype=np.uint8), **members)
    write_atomically(workspace.checkpoint, buffer.getvalue())


def read_checkpoint(workspace: Workspace, study: Study, written: str = "") -> Checkpoint:
    """The run's checkpoint; an empty one if none was written yet.

    Parameters
    ----------
    written
        Hash of the study as it was written, which a later version of this program may know more options of.

    Raises
    ------
    CheckpointError
        If the file is damaged, or of another study.
    """
    path = workspace.checkpoint
    if not path.exists():
        return Checkpoint()
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as archive:
            index = json.loads(archive["index"].tobytes())
            arrays: dict[str, dict[str, Any]] = {"adapter": {}, "optimizer": {}, "profiles": {}}
            for number, (kind, name) in enumerate(index["arrays"]):
                arrays[kind][name] = archive[f"a{number}"]
        head = _Head.model_validate(index["head"])
    except ValidationError as cause:
        raise CheckpointError(f"{path}: not a checkpoint: {first_problem(cause)}") from cause
    except (OSError, ValueError, LookupError, TypeError, EOFError, BadZipFile) as cause:
        raise CheckpointError(
            f"{path}: the checkpoint can't be read ({type(cause).__name__}); the run can't go on from it, and the "
            "sites' answers are charged to it"
        ) from cause
    if head.format != FORMAT or head.study_sha256 not in (study.sha256, written):
        raise CheckpointError(
            f"{path}: is of format {head.format} and study {head.study_sha256[:12]}…; format {FORMAT} and this run's "
            f"study {study.sha256[:12]}… are needed"
        )
    return Checkpoint(round=head.round, sites=head.sites, reports=head.reports, **arrays)


def check_fits(checkpoint: Checkpoint, workspace: Workspace, initial: Adapter, study: Study) -> None:
    """Refuse a checkpoint of another adapter or other rounds than the study's.

    Raises
    ------
    CheckpointError, AdapterMismatchError
    """
    from common.models.generator import check_adapter

    if checkpoint.round > study.training.rounds:
        raise CheckpointError(
            f"{workspace.checkpoint}: has finished round {checkpoint.round}; the study has {study.training.rounds}"
        )
    if checkpoint.round:
        check_adapter(checkpoint.adapter, {name: value.shape for name, value in initial.items()})


def read_unfinished(workspace: Workspace) -> Study:
    """The study of a run that can go on.

    Raises
    ------
    CheckpointError
        If the folder holds no run, or a finished one.
    """
    if not workspace.study.is_file() or not workspace.identity.is_file():
        raise CheckpointError(f"{workspace.root}: no run is there that could go on; a run's folder is needed")
    if workspace.summary_json.exists():
        raise CheckpointError(f"{workspace.root}: this run is finished; its summary is {workspace.summary_text.name}")
    try:
        return Study.from_canonical(workspace.study.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise CheckpointError(f"{workspace.study}: the run's study can't be read: {cause}") from cause


class _Identity(BaseModel):
    """``run.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    run_id: str = Field(min_length=1)


def write_identity(workspace: Workspace, run_id: str) -> None:
    """Make a new run's name durable."""
    write_atomically(workspace.identity, _Identity(format=FORMAT, run_id=run_id).model_dump_json().encode())


def read_identity(workspace: Workspace) -> str:
    """The run's name.

    Raises
    ------
    CheckpointError
        If the file can't be read.
    """
    try:
        return _Identity.model_validate_json(workspace.identity.read_bytes()).run_id
    except (OSError, ValidationError) as cause:
        raise CheckpointError(
            f"{workspace.identity}: the run's name can't be read; without it nothing goes on"
        ) from cause


@contextmanager
def held(workspace: Workspace) -> Iterator[None]:
    """Hold a run while it goes on: two that went on at once would ask sites for the same rounds.

    Raises
    ------
    FederationError
        If another process holds it.
    """
    with workspace.lock.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as cause:
            raise FederationError(f"{workspace.root}: this run is going on in another process; wait for it") from cause
        yield
