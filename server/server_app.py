"""The ServerApp: one Flower run, two strategies in sequence. `run_study` reads like the paper's drawing.

study -> census -> phase 1: LoRA DP-FedAvg (strong, R rounds) -> candidate pool
                                                                      |
corpus <- aggregator <- phase 2: profile and vote (weak, ONE round) <-'
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from common.errors import FederationError, GenerationError, StudyError
from common.logs import log_to_stderr
from common.models.generator import Generator
from common.protocol import Adapter
from common.study import Study
from server.aggregate import pool_sizes, sum_profiles
from server.assembly import AssembledCorpus, assemble_corpus, to_pool
from server.census import take_census
from server.corpus import write_ballots, write_corpus, write_pool, write_profiles
from server.generation import TextSampler
from server.ledger_heads import LedgerHeads
from server.progress import Progress
from server.report import write_summary
from server.strategies.lora_dp_fedavg import LoraDpFedAvg
from server.strategies.profile_and_vote import ProfileAndVote
from server.summary import summarise
from server.workspace import Workspace, replace_folder, write_atomically

log = logging.getLogger("fedcorpus.server")

app = ServerApp()


@dataclass(frozen=True)
class Run:
    """What a run is made of: its study, its folder, its name, where it reports, and what is known of ledgers."""

    study: Study
    workspace: Workspace
    run_id: str
    progress: Progress
    heads: LedgerHeads


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Flower's entry: open the run that the configuration names, and report how it ends."""
    log_to_stderr()
    options = context.run_config
    run = open_run(str(options["study"]), str(options["workspace"]), str(options["coordinator-state"]))
    try:
        run_study(grid, run)
    except Exception as error:
        run.progress.failed(f"{error}" if str(error) else type(error).__name__)
        raise
    run.progress.finished()


def run_study(grid: Grid, run: Run) -> None:
    """The whole algorithm."""
    study, progress = run.study, run.progress
    generator = Generator(study.generator)

    with progress.phase("census", total=study.federation.expected_sites):
        roster = take_census(grid, study, run.run_id, progress, run.heads)

    with progress.phase("training", total=study.training.rounds):
        fedavg = LoraDpFedAvg(
            study, run.run_id, roster, generator.frozen_sha256(), progress, _Checkpoint(run, generator)
        )
        tuned = fedavg.fine_tune(grid, generator.adapter())
        generator.load_adapter(tuned.adapter)

    with progress.phase("pool", total=study.pool.size):
        sampler = TextSampler(generator, study)
        strong_profile = sum_profiles(list(tuned.profiles.values())) if tuned.profiles else None
        sizes = pool_sizes(strong_profile, len(study.codes), study.pool.size, study.pool.floor)
        pool = to_pool(sampler.sample(sizes, lambda made, wanted: progress.step("pool", made, wanted)))
        if not len(pool):
            raise GenerationError(f"pool: none of {study.pool.size} texts was usable; dropped: {sampler.drops}")
        write_pool(run.workspace.pool, pool)

    with progress.phase("votes", total=len(roster.of_tier("weak"))):
        votes = ProfileAndVote(study, run.run_id, roster, progress).collect(grid, pool)
        write_profiles(run.workspace.profiles, {**tuned.profiles, **votes.profiles})
        write_ballots(run.workspace.ballots, votes.ballots)

    with progress.phase("corpus", total=study.corpus.size):
        corpus = assemble_corpus(
            study,
            pool,
            list(tuned.profiles.values()),
            votes,
            sampler,
            lambda made, wanted: progress.step("corpus", study.corpus.size - wanted + made, study.corpus.size),
        )
        write_corpus(run.workspace, study.codes, corpus.texts)
        _report_holes(corpus, study, progress)

    summary = summarise(run.workspace, study, run.run_id, roster, pool, votes, corpus, sampler.drops, progress)
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
    root = Path(workspace)
    if not workspace or not root.is_absolute():
        raise FederationError(f"run config 'workspace' is {workspace!r}; an absolute folder is needed")
    if not study:
        raise StudyError("run config 'study' is empty; the path of a study file is needed")
    loaded = Study.load(Path(study))
    folder = Workspace(root).create()
    if folder.study.exists():
        raise FederationError(f"{root}: holds a run already; give every run a folder of its own")
    write_atomically(folder.study, loaded.canonical.encode())
    heads = LedgerHeads(Path(state) if state else None)
    return Run(loaded, folder, uuid.uuid4().hex, Progress(folder.progress), heads)


class _Checkpoint:
    """Keeps the averaged adapter of the last finished round on disk, in peft's layout."""

    def __init__(self, run: Run, generator: Generator) -> None:
        self._run, self._generator = run, generator

    def __call__(self, server_round: int, adapter: Adapter) -> None:
        self._generator.load_adapter(adapter)
        replace_folder(self._run.workspace.adapter, self._generator.save_adapter)
        log.info("round %d: adapter saved", server_round)


def _report_holes(corpus: AssembledCorpus, study: Study, progress: Progress) -> None:
    for code, missing in enumerate(corpus.holes):
        if missing:
            progress.note(f"code {study.codes.label(code)}: {missing} texts are missing; the generator gave none")
