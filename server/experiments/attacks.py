"""The step that attacks a fine-tuned model: which documents did it learn from, and which canaries does it know?

The attacker has the adapter, which is released, and the documents to decide about. It goes by how much likelier
fine-tuning made a text than the base model had it, so that a text which is likely anyway isn't taken for a member.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import UserError
from common.study import Study
from server.evaluation import leakage
from server.evaluation.intervals import Floats
from server.evaluation.texts import Texts
from server.experiments.cache import Earlier, Step
from server.experiments.canaries import Canaries
from server.experiments.federation import phase_study
from server.experiments.notes import write_numbers
from server.experiments.situation import TUNED, Situation
from server.experiments.tuning import Tuned

if TYPE_CHECKING:
    from common.models.generator import Generator

_AT_ONCE = 32


class Attacks(Step):
    """Membership inference and exposure, of the model; the corpus is attacked where it is judged."""

    kind = "attacks"
    sources = (
        "common/codes.py",
        "common/models/generator.py",
        "common/models/architectures.py",
        "server/evaluation/leakage.py",
        "server/experiments/attacks.py",
        "server/experiments/canaries.py",
    )

    def __init__(self, situation: Situation) -> None:
        self._situation = situation

    @property
    def rate(self) -> str:
        """Models differ."""
        return self._situation.cell.model

    @property
    def units(self) -> float:
        """Tokens that pass through the model, at most."""
        situation = self._situation
        canaries = 0 if situation.canaries is None else len(situation.canaries.all)
        texts = 2 * situation.experiment.judging.most + canaries
        return float(2 * texts * situation.study.generator.max_tokens)

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """Model, adapter, and both kinds of texts."""
        situation = self._situation
        return {
            "study": situation.part(self._study("package:none")),
            "model": situation.base_sha256(earlier),
            "tuned": earlier[TUNED].sha256,
            "sites": [site.sha256 for site in situation.training_sites],
            "test": situation.data.test_sha256,
            "canaries": None if situation.canaries is None else situation.canaries.sha256,
            "most": situation.experiment.judging.most,
            "seed": situation.seed,
        }

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """Score every text by how much likelier it became."""
        from common.models.generator import Generator

        situation = self._situation
        study = self._study(situation.base(earlier))
        members, others = situation.attacked
        names = study.codes.names
        texts, codes = [*members.texts, *others.texts], [*_codes(members, names), *_codes(others, names)]
        if (canaries := situation.canaries) is not None:
            texts += canaries.all
            codes += [tuple(canaries.code[name] for name in names)] * len(canaries.all)
        numbers = [study.codes.combinations.index(code) for code in codes]
        generator = Generator(study.generator)
        if canaries is not None:
            _check_told_apart(generator, canaries, generator.prompts(study.codes)[numbers[-1]])
        before = losses(generator, texts, numbers, study)
        self.progress(1, 2)
        generator.load_adapter(Tuned.read(earlier[TUNED]).adapter)
        likelier = before - losses(generator, texts, numbers, study)
        self.progress(2, 2)
        of_members, of_others, of_canaries = np.split(likelier, [len(members), len(members) + len(others)])
        attack = leakage.membership(of_members, of_others, situation.seed)
        found = {"membership AUC, model": attack.auc.value}
        if attack.tpr is not None:
            found["members found at 1 %, model"] = attack.tpr.value
        if canaries is not None:
            planted, references = np.split(of_canaries, [len(canaries.planted)])
            found["exposure, model"] = leakage.mean_exposure(planted, references)
        write_numbers(out, found)

    def _study(self, base: str) -> Study:
        situation = self._situation
        nothing_released = {"epsilon": 1.0, "delta": 1e-6}
        return phase_study(
            situation.study, ("generator",), "strong", (), generator={"base": base}, privacy=nothing_released
        )


def losses(generator: Generator, texts: Sequence[str], codes: Sequence[int], study: Study) -> Floats:
    """Loss of each text under its code, mean over its tokens, float64 ``(texts,)``."""
    import torch

    from common.models.generator import document_losses

    by_code = generator.prompts(study.codes)
    prompts = [by_code[code] for code in codes]
    encoded = generator.encode(texts, [generator.room(prompt) for prompt in prompts])
    found = np.zeros(len(texts))
    order = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
    generator.model.eval()
    with torch.no_grad():
        for start in range(0, len(order), _AT_ONCE):
            chunk = order[start : start + _AT_ONCE]
            batch = generator.batch([prompts[i] for i in chunk], [encoded[i] for i in chunk])
            found[chunk] = document_losses(generator.model, batch).cpu().numpy()
    return found


def _check_told_apart(generator: Generator, canaries: Canaries, prompt: Sequence[int]) -> None:
    """Canaries whose numbers are cut off would look unknown to any model."""
    room = generator.room(prompt)
    encoded = generator.encode(canaries.all, [room] * len(canaries.all))
    if len({tuple(tokens) for tokens in encoded}) < len(encoded):
        raise UserError(
            f"canaries: generator.max_tokens is {generator.options.max_tokens}, of which the prompt leaves {room} for "
            "the text, and the numbers of canaries are cut off; take more tokens, or a shorter codes.preamble"
        )


def _codes(texts: Texts, names: Sequence[str]) -> list[tuple[str, ...]]:
    return list(zip(*(texts.labels[name] for name in names), strict=True))
