"""The step in which sites profile and vote: phase 2 as it is, over real sites with doors, ledgers and noise."""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.privacy.accounting import joint_epsilon
from common.site.plan import weak_plan
from common.study import Privacy, Study
from server.census import take_census
from server.checkpoint import read_identity, write_identity
from server.corpus import read_ballots, read_profiles, write_ballots, write_profiles
from server.experiments.cache import Earlier, Made, Step
from server.experiments.federation import matching_paper, phase_study, require_answers, write_sites
from server.experiments.grid import InProcessGrid
from server.experiments.notes import write_notes
from server.experiments.places import embedder_of, embedder_sha256
from server.experiments.poison import hostile
from server.experiments.pooling import pool_name, pool_of, votes_name
from server.experiments.situation import Situation
from server.progress import Progress
from server.strategies.profile_and_vote import Ballots, ProfileAndVote
from server.workspace import Workspace, write_atomically

_TOLERANCE = 1.005


@dataclass(frozen=True)
class Votes:
    """What came of a vote, and the study that was asked."""

    ballots: Ballots
    study: Study

    @classmethod
    def read(cls, made: Made) -> Votes:
        """Of a step's result."""
        folder = made.folder
        found = Ballots(read_profiles(folder / "profiles.json"), read_ballots(folder / "ballots.npz"))
        return cls(found, Study.from_canonical((folder / "study.json").read_text(encoding="utf-8")))


class Vote(Step):
    """One vote on one pool."""

    kind = "votes"
    sources = (
        "client_weak",
        "common/codes.py",
        "common/privacy",
        "common/models/embedder.py",
        "server/strategies/profile_and_vote.py",
        "server/strategies/plausibility.py",
        "server/experiments/poison.py",
    )

    def __init__(self, situation: Situation, iteration: int) -> None:
        self._situation, self._iteration = situation, iteration

    @property
    def name(self) -> str:
        """One for every iteration."""
        return votes_name(self._iteration)

    @property
    def rate(self) -> str:
        """Embedders differ."""
        return self._situation.study.voting.embedder

    @property
    def units(self) -> float:
        """Texts that are embedded, a pool at every site."""
        sites = self._situation.voting_sites
        return float(sum(site.units for site in sites) + len(sites) * self._situation.study.pool.size)

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """Study, pool, documents, embedder, and what else the cell says of votes."""
        situation, cell = self._situation, self._situation.cell
        return {
            "study": self._part,
            "embedder": embedder_sha256(situation.study.voting.embedder),
            "pool": earlier[pool_name(self._iteration)].sha256,
            "sites": [site.sha256 for site in situation.voting_sites],
            "as paper": cell.as_paper,
            "iterations": cell.iterations,
            "poisoning": cell.poisoning if cell.poisoning in ("stuffed", "inverted") else "none",
        }

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """Census and vote, as `server.server_app.run_study` has them."""
        situation, sites = self._situation, self._situation.voting_sites
        study = self._promising(self._study())
        pool = pool_of(earlier[pool_name(self._iteration)])
        space = Workspace(work)
        if not space.identity.exists():
            write_identity(space, uuid.uuid4().hex)
        run_id, progress = read_identity(space), Progress(space.progress)
        files = write_sites(situation.homes, work / "sites", "weak", sites, study)
        grid = InProcessGrid(files, {1: hostile(situation.cell.poisoning, study, pool)} if self._has_liar else {})
        roster = take_census(grid, study, run_id, progress, tiers=("weak",))
        votes = ProfileAndVote(study, run_id, roster, progress).collect(grid, pool)
        require_answers(roster, sites)
        write_profiles(out / "profiles.json", votes.profiles)
        write_ballots(out / "ballots.npz", votes.ballots)
        write_atomically(out / "study.json", study.canonical.encode())
        plan = weak_plan(study)
        composed = joint_epsilon(plan.mechanisms * situation.cell.iterations, plan.delta)
        write_notes(
            out,
            {
                "vote epsilon": plan.epsilon if situation.cell.iterations == 1 else composed,
                "vote epsilon, composed": composed,
                "vote noise": plan.votes.scale,
                "vote profile noise": plan.profile.scale,
                "votes of a unit": float(study.votes_per_unit),
            },
        )

    @cached_property
    def _part(self) -> dict[str, Any]:
        study = self._situation.part(self._study())
        study["voting"].pop("embedder")
        return study

    @property
    def _has_liar(self) -> bool:
        return self._situation.cell.poisoning in ("stuffed", "inverted")

    def _study(self) -> Study:
        situation = self._situation
        pool = situation.study.pool
        privacy = {} if situation.cell.vote_epsilon is None else {"epsilon": situation.cell.vote_epsilon}
        return phase_study(
            situation.study, ("privacy", "voting"), "weak", situation.voting_sites,
            privacy=privacy, pool={"size": pool.size},
            voting={
                "embedder": embedder_of(situation.study.voting.embedder),
                # What 'auto' means follows from the pool, and two ways to say the same are one.
                "neighbours": situation.study.neighbours,
            },
        )  # fmt: skip

    def _promising(self, study: Study) -> Study:
        """The study with the privacy that the cell means."""
        cell, sites = self._situation.cell, self._situation.voting_sites
        if cell.as_paper:
            study = study.model_copy(update={"privacy": matching_paper(study, "weak", sites)})
        if cell.iterations > 1:
            study = study.model_copy(update={"privacy": shared(study, cell.iterations)})
        return study


def shared(study: Study, iterations: int) -> Privacy:
    """Privacy of one of several votes that together cost what the study promises, composed as one.

    Gaussians of variance n times as large cost n together what one costs; the discrete ones differ a little, and are
    given more noise until they keep the promise.
    """
    once = weak_plan(study)
    noise = once.votes.scale / math.sqrt(study.votes_per_unit) * math.sqrt(iterations)
    promised = study.privacy.epsilon or once.epsilon
    while True:
        one = study.privacy.model_copy(
            update={"epsilon": None, "vote_noise_multiplier": noise, "training_noise_multiplier": 1.0}
        )
        plan = weak_plan(study.model_copy(update={"privacy": one}))
        if joint_epsilon(plan.mechanisms * iterations, once.delta) <= promised:
            return one
        noise *= _TOLERANCE
