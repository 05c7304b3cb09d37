"""Steps that fine-tune the generator: by DP-FedAvg over real sites, or plainly, for a comparison without privacy."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.privacy.accounting import joint_epsilon
from common.protocol import pack_release, unpack_release
from common.site.plan import strong_plan
from common.study import Study
from server.census import take_census
from server.checkpoint import Checkpoint, read_checkpoint, read_identity, write_checkpoint, write_identity
from server.corpus import read_profiles, write_profiles
from server.experiments.cache import Earlier, Made, Step
from server.experiments.federation import matching_paper, phase_study, require_answers, write_sites
from server.experiments.grid import InProcessGrid
from server.experiments.notes import write_notes
from server.experiments.situation import TUNED, Situation
from server.progress import Progress
from server.strategies.lora_dp_fedavg import LoraDpFedAvg
from server.workspace import Workspace, write_atomically

Adapter = Mapping[str, NDArray[np.float32]]

_COMMON = ("common/codes.py", "common/models/generator.py", "common/models/architectures.py", "common/models/lora.py")


@dataclass(frozen=True)
class Tuned:
    """What a fine-tuning left: the averaged adapter, and each training site's profile, int64 ``(codes,)``."""

    adapter: Adapter
    profiles: Mapping[str, NDArray[np.int64]]

    @classmethod
    def read(cls, made: Made) -> Tuned:
        """Of a step's result."""
        adapter = unpack_release((made.folder / "adapter.npz").read_bytes())
        return cls(adapter, read_profiles(made.folder / "profiles.json"))

    def write(self, folder: Path) -> None:
        """As a step's result."""
        write_atomically(folder / "adapter.npz", pack_release(self.adapter))
        write_profiles(folder / "profiles.json", self.profiles)


class _Tuning(Step):
    """What both ways have in common."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation

    @property
    def name(self) -> str:
        """However it was made, later steps see an adapter."""
        return TUNED

    @property
    def rate(self) -> str:
        """Models differ."""
        return self._situation.cell.model

    @property
    def units(self) -> float:
        """Tokens that pass through the model, as far as the study says."""
        training, tokens = self._situation.study.training, self._situation.study.generator.max_tokens
        documents = training.rounds * training.steps * training.batch_size
        return float(documents * tokens * len(self._situation.training_sites))

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """Model, study and documents."""
        return {
            "study": self._part,
            "model": self._situation.base_sha256(earlier),
            "sites": [site.sha256 for site in self._situation.training_sites],
        }

    @cached_property
    def _part(self) -> dict[str, Any]:
        return self._situation.part(self._study("package:none"))

    def _study(self, base: str) -> Study:
        situation = self._situation
        return phase_study(
            situation.study, ("privacy", "generator", "training"), "strong", situation.training_sites,
            generator={"base": base},
        )  # fmt: skip


class PrivateTuning(_Tuning):
    """Phase 1 as it is: LoRA DP-FedAvg over sites with doors, ledgers and noise. Goes on after the last whole round."""

    kind = "tuning"
    sources = (
        *_COMMON,
        "client_strong",
        "common/privacy",
        "server/strategies/lora_dp_fedavg.py",
        "server/strategies/aggregation.py",
        "server/strategies/server_optimizer.py",
    )

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """Also whose epsilon it is."""
        return super().inputs(earlier) | {"as paper": self._situation.cell.as_paper}

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """Census and training, as `server.server_app.run_study` has them."""
        from common.models.generator import Generator

        situation, sites = self._situation, self._situation.training_sites
        study = self._study(situation.base(earlier))
        if situation.cell.as_paper:
            study = study.model_copy(update={"privacy": matching_paper(study, "strong", sites)})
        space = Workspace(work)
        if not space.identity.exists():
            write_identity(space, uuid.uuid4().hex)
        run_id, progress = read_identity(space), Progress(space.progress)
        files = write_sites(situation.homes, work / "sites", "strong", sites, study)
        grid = InProcessGrid(files)
        roster = take_census(grid, study, run_id, progress, tiers=("strong",))
        generator, start = Generator(study.generator), read_checkpoint(space, study)
        roster.recall(start.sites)

        def keep(state: Checkpoint) -> None:
            write_checkpoint(space, study, state)
            self.progress(state.round, study.training.rounds)

        fedavg = LoraDpFedAvg(study, run_id, roster, generator.frozen_sha256(), progress, start, keep)
        tuned = fedavg.fine_tune(grid, generator.adapter())
        require_answers(roster, sites)
        Tuned(tuned.adapter, tuned.profiles).write(out)
        plans = [strong_plan(study, site.size_class) for site in sites]
        costliest = max(plans, key=lambda plan: plan.epsilon)
        composed = costliest.epsilon
        if costliest.accounting == "paper":
            composed = joint_epsilon(costliest.mechanisms, costliest.delta)
        write_notes(
            out,
            {
                "training epsilon": costliest.epsilon,
                "training epsilon, composed": composed,
                "training noise multiplier": max(plan.training.noise_multiplier for plan in plans),
                "training profile noise": max(plan.profile.scale for plan in plans),
                "training weights": float(sum(value.size for value in tuned.adapter.values())),
                "training signal to noise, at most": tuned.reports[-1].signal_to_noise,
            },
        )


class PlainTuning(_Tuning):
    """Federated averaging without any privacy, the same in all else: for public text, to see what privacy costs.

    No clipping, no noise, exact profiles, and no door: what sites would have to give out is what no site of this system
    gives. A batch is drawn as privately trained ones are, each unit by itself.
    """

    kind = "plain-tuning"
    sources = (*_COMMON, "server/experiments/tuning.py")

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """Privacy has no part in it."""
        study = {name: value for name, value in self._part.items() if name != "privacy"}
        return super().inputs(earlier) | {"study": study, "seed": self._situation.seed}

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """Rounds of local steps and an equal mean."""
        from common.models.generator import Generator
        from server.experiments.plain import PlainSite, plain_rounds

        situation = self._situation
        study = self._study(situation.base(earlier))
        sites = [PlainSite.read(site, study) for site in situation.training_sites]
        adapter = plain_rounds(Generator(study.generator), sites, study, situation.seed, self.progress)
        Tuned(adapter, {site.name: site.profile(len(study.codes)) for site in sites}).write(out)


def tuning(situation: Situation) -> Sequence[Step]:
    """The step that a cell has for it, if any."""
    if situation.cell.trains == "nobody":
        return ()
    return (PrivateTuning(situation) if situation.cell.noise else PlainTuning(situation),)
