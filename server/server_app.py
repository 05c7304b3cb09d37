"""The ServerApp: one Flower run, two strategies in sequence. `run_study` reads like the paper's drawing.

study -> census -> phase 1: LoRA DP-FedAvg (strong, R rounds) -> candidate pool
                                                                      |
corpus <- aggregator <- phase 2: profile and vote (weak, ONE round) <-'
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from common.errors import FederationError, GenerationError, StudyError
from common.logs import log_to_stderr
from common.models.generator import Generator
from common.protocol import CandidatePool
from common.study import Study
from server.aggregate import pool_sizes, sum_profiles
from server.assembly import AssembledCorpus, assemble_corpus, to_pool
from server.census import Roster, take_census
from server.checkpoint import (
    Checkpoint,
    check_fits,
    held,
    read_checkpoint,
    read_identity,
    read_unfinished,
    write_checkpoint,
    write_identity,
)
from server.corpus import (
    read_ballots,
    read_pool,
    read_profiles,
    write_ballots,
    write_corpus,
    write_pool,
    write_profiles,
)
from server.generation import SyntheticText, TextSampler
from server.html_report import report_or_note
from server.ledger_heads import LedgerHeads
from server.progress import Progress
from server.recorded import RecordedSampler
from server.report import write_summary
from server.strategies.lora_dp_fedavg import LoraDpFedAvg
from server.strategies.profile_and_vote import Ballots, ProfileAndVote
from server.summary import summarise
from server.workspace import Workspace, replace_folder, write_atomically

log = logging.getLogger("fedcorpus.server")

app = ServerApp()


@dataclass(frozen=True)
class Run:
    """What a run is made of: its study, its folder, its name, where it reports and stands, what is known of ledgers."""

    study: Study
    workspace: Workspace
    run_id: str
    progress: Progress
    heads: LedgerHeads
    start: Checkpoint = field(default_factory=Checkpoint)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Flower's entry: open the run that the configuration names, and report how it ends."""
    log_to_stderr()
    options = context.run_config
    names = str(options["study"]), str(options["workspace"]), str(options["coordinator-state"])
    with held(_folder(names[1])):
        run = (reopen_run if options["resume"] else open_run)(*names)
        try:
            run_study(grid, run)
        except Exception as error:
            run.progress.failed(f"{error}" if str(error) else type(error).__name__)
            raise
        report_or_note(run.workspace, run.progress.note)
        run.progress.finished()


def run_study(grid: Grid, run: Run) -> None:
    """The whole algorithm. What an earlier attempt of this run has done isn't done again."""
    study, progress = run.study, run.progress
    generator = Generator(study.generator)
    check_fits(run.start, run.workspace, generator.adapter(), study)

    with progress.phase("census", total=study.federation.expected_sites):
        roster = take_census(grid, study, run.run_id, progress, run.heads, _tiers_to_ask(run))
        roster.recall(run.start.sites)
        write_checkpoint(run.workspace, study, replace(run.start, sites=roster.known()))

    with progress.phase("training", total=study.training.rounds):
        keep = _OnRound(run, generator)
        fedavg = LoraDpFedAvg(study, run.run_id, roster, generator.frozen_sha256(), progress, run.start, keep)
        tuned = fedavg.fine_tune(grid, generator.adapter())
        generator.load_adapter(tuned.adapter)

    with progress.phase("pool", total=study.pool.size):
        sampler = RecordedSampler(TextSampler(generator, study), run.workspace, run.run_id)
        pool = _pool(run, sampler, list(tuned.profiles.values()))

    with progress.phase("votes", total=len(roster.of_tier("weak"))):
        votes = _earlier_votes(run, roster) or ProfileAndVote(study, run.run_id, roster, progress).collect(grid, pool)
        write_profiles(run.workspace.profiles, {**tuned.profiles, **votes.profiles})
        write_ballots(run.workspace.ballots, votes.ballots)
        write_checkpoint(run.workspace, study, replace(keep.last, sites=roster.known()))

    with progress.phase("corpus", total=study.corpus.size):
        corpus = assemble_corpus(
            study,
            pool,
            list(tuned.profiles.values()),
            votes,
            sampler,
            lambda made, wanted: progress.step("corpus", made, wanted),
        )
        write_corpus(run.workspace, study.codes, corpus.texts)
        sampler.forget()
        _report_holes(corpus, study, progress)

    summary = summarise(
        run.workspace, study, run.run_id, roster, pool, votes, corpus, sampler.plain.drops, tuned.reports, progress
    )
    write_summary(run.workspace, summary)


def open_run(study: str, workspace: str, state: str = "") -> Run:
    """Open a run in a folder of its own; ``state`` is where the coordinator remembers ledgers between runs.

    Raises
    ------
    StudyError
        If the study can't be read.
    FederationError
        If the folder isn't absolute or holds a run already.
    """
    if not study:
        raise StudyError("run config 'study' is empty; the path of a study file is needed")
    loaded = Study.load(Path(study))
    folder = _folder(workspace)
    if folder.study.exists():
        raise FederationError(f"{folder.root}: holds a run already; give every run a folder of its own")
    run_id = uuid.uuid4().hex
    write_identity(folder, run_id)
    write_atomically(folder.study, loaded.canonical.encode())
    heads = LedgerHeads(Path(state) if state else None)
    return Run(loaded, folder, run_id, Progress(folder.progress), heads)


def reopen_run(_study: str, workspace: str, state: str = "") -> Run:
    """Open a run that was left before it was finished; its study is the one in its folder.

    Raises
    ------
    CheckpointError
        If the folder holds no such run, or its state is damaged.
    """
    folder = _folder(workspace)
    study = read_unfinished(folder)
    heads = LedgerHeads(Path(state) if state else None)
    start = read_checkpoint(folder, study)
    return Run(study, folder, read_identity(folder), Progress(folder.progress), heads, start)


def _folder(workspace: str) -> Workspace:
    root = Path(workspace)
    if not workspace or not root.is_absolute():
        raise FederationError(f"run config 'workspace' is {workspace!r}; an absolute folder is needed")
    return Workspace(root).create()


class _OnRound:
    """Makes the state after each round durable, and its adapter in peft's layout."""

    def __init__(self, run: Run, generator: Generator) -> None:
        self._run, self._generator = run, generator
        self.last = run.start

    def __call__(self, state: Checkpoint) -> None:
        self.last = state
        write_checkpoint(self._run.workspace, self._run.study, state)
        self._generator.load_adapter(state.adapter)
        replace_folder(self._run.workspace.adapter, self._generator.save_adapter)
        log.info("round %d: adapter saved", state.round)


def _tiers_to_ask(run: Run) -> list[str]:
    """Tiers that something is still to be asked of."""
    trained = run.start.round == run.study.training.rounds
    return [*([] if trained else ["strong"]), *([] if run.workspace.ballots.exists() else ["weak"])]


def _pool(run: Run, sampler: RecordedSampler, strong_profiles: Sequence[NDArray[np.int64]]) -> CandidatePool:
    """The candidates, on disk before anybody sees them: sites vote on one pool in a run."""
    if run.workspace.pool.exists():
        pool = read_pool(run.workspace.pool)
        sampler.plain.remember(
            SyntheticText(text, int(code)) for text, code in zip(pool.texts, pool.codes, strict=True)
        )
        return pool
    study, progress = run.study, run.progress
    profile = sum_profiles(strong_profiles) if strong_profiles else None
    sizes = pool_sizes(profile, len(study.codes), study.pool.size, study.pool.floor)
    pool = to_pool(sampler.sample(sizes, lambda made, wanted: progress.step("pool", made, wanted), series="pool"))
    if not len(pool):
        raise GenerationError(f"pool: none of {study.pool.size} texts was usable; dropped: {sampler.plain.drops}")
    write_pool(run.workspace.pool, pool)
    # What is read back is what is written, whatever can't be encoded in a text.
    return read_pool(run.workspace.pool)


def _earlier_votes(run: Run, roster: Roster) -> Ballots | None:
    """The votes that an earlier attempt collected to the end."""
    if not run.workspace.ballots.exists():
        return None
    ballots, profiles = read_ballots(run.workspace.ballots), read_profiles(run.workspace.profiles)
    for site in roster.all:
        if site.name in ballots and not site.answers:
            site.answered()
    return Ballots({name: profiles[name] for name in ballots}, ballots)


def _report_holes(corpus: AssembledCorpus, study: Study, progress: Progress) -> None:
    for code, missing in enumerate(corpus.holes):
        if missing:
            progress.note(f"code {study.codes.label(code)}: {missing} texts are missing; the generator gave none")
