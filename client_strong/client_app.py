"""The strong tier's ClientApp: one round of DP-SGD, and the noisy profile with the first reply."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_strong.trainer import TrainingDocuments, train_round
from common import study as studies
from common.errors import AdapterMismatchError, PrivacyError
from common.models.generator import Generator
from common.privacy.accounting import PrivacyPlan, StrongPlan
from common.privacy.values import Noised
from common.protocol import TrainRequest
from common.site.config import Site
from common.site.documents import Documents
from common.site.door import PROFILE, Door
from common.site.locate import load_site
from common.site.profile import noisy_profile

log = logging.getLogger("fedcorpus.strong")

app = ClientApp()


@app.train("lora")
def train(message: Message, context: Context) -> Message:
    """Answer one training request, through the door."""
    site = load_site(context)
    request = TrainRequest.from_records(message.content)

    def compute(plan: PrivacyPlan, parts: Sequence[str]) -> Mapping[str, Noised]:
        return answer(site, request, plan, parts)

    return Message(Door(site).release(request, compute).to_records(), reply_to=message)


def answer(site: Site, request: TrainRequest, plan: PrivacyPlan, parts: Sequence[str]) -> Mapping[str, Noised]:
    """Compute what a training request asks for: ``adapter/NAME`` arrays and, if it is in ``parts``, the profile."""
    if not isinstance(plan, StrongPlan):
        raise PrivacyError(f"site {site.name!r}: a strong site's plan is needed, this is a {type(plan).__name__}")
    study = request.study
    generator = _generator(study.generator, tuple(site.models.items()))
    if request.frozen_sha256 != generator.frozen_sha256():
        raise AdapterMismatchError(f"site {site.name!r}: the frozen part of the adapter isn't the study's")
    documents = Documents.load(site, study)
    log.info("documents at site %s: %s", site.name, documents.report())
    profile = {PROFILE: noisy_profile(documents, study, plan.profile)} if PROFILE in parts else {}
    trained = train_round(
        generator,
        TrainingDocuments.encode(documents, generator, study),
        study,
        plan,
        request.adapter,
        on_step=lambda step: log.info("round %d: step %d of %d", request.round, step, study.training.steps),
    )
    return profile | {f"adapter/{name}": value for name, value in trained.items()}


@lru_cache(maxsize=1)
def _generator(options: studies.Generator, local: tuple[tuple[str, Path], ...]) -> Generator:
    # In simulation one process serves many rounds and sites; in deployment every message starts a new process.
    return Generator(options, dict(local))
