"""The strong tier's ClientApp: one round of DP-SGD, and the noisy profile with the first reply."""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_strong.gradient_check import GRADIENTS, check_gradients
from client_strong.gradients import PerSampleGradients
from client_strong.trainer import TrainingDocuments, train_round
from common import study as studies
from common.errors import AdapterMismatchError, PrivacyError
from common.models.generator import Generator
from common.privacy.accounting import StrongPlan
from common.protocol import TrainRequest
from common.site.config import Machine, Site
from common.site.documents import Documents
from common.site.door import PROFILE, Answer, Compute, Door, Task
from common.site.locate import load_site
from common.site.profile import noisy_profile

log = logging.getLogger("fedcorpus.strong")

_M_MMAP_THRESHOLD = -3
"""Number of this option in glibc's malloc.h."""

app = ClientApp()


@app.train("lora")
def train(message: Message, context: Context) -> Message:
    """Answer one training request, through the door."""
    site = load_site(context)
    request = TrainRequest.from_records(message.content)

    def prepare() -> Compute:
        return prepared(site, request)

    return Message(Door(site).release(request, prepare).to_records(), reply_to=message)


def prepared(site: Site, request: TrainRequest) -> Compute:
    """Read documents and model; what comes back computes ``adapter/NAME`` arrays and, if it is asked, the profile."""
    study = request.study
    generator, gradients = _ready(study.generator, tuple(site.models.items()), site.machine)
    if request.frozen_sha256 != generator.frozen_sha256():
        raise AdapterMismatchError(f"site {site.name!r}: the frozen part of the adapter isn't the study's")
    generator.start_round(request.round)
    generator.load_adapter(request.adapter)
    documents = Documents.load(site, study)
    encoded = TrainingDocuments.encode(documents, generator, study)

    def compute(task: Task) -> Answer:
        plan = task.plan
        if not isinstance(plan, StrongPlan):
            raise PrivacyError(f"site {site.name!r}: a strong site's plan is needed, this is a {type(plan).__name__}")
        profile = {PROFILE: noisy_profile(documents, study, plan.profile)} if PROFILE in task.parts else {}
        trained = train_round(
            generator,
            encoded,
            study,
            plan,
            request.adapter,
            gradients,
            site.machine,
            kept=task.kept,
            on_step=lambda step: log.info("round %d: step %d of %d", request.round, step, study.training.steps),
        )
        goes_on = study.training.keep_optimizer and request.round < study.training.rounds
        return Answer(
            profile | {f"adapter/{name}": value for name, value in trained.adapter.items()},
            kept=trained.optimizer if goes_on else {},
        )

    return compute


@lru_cache(maxsize=1)
def _ready(
    options: studies.Generator, local: tuple[tuple[str, Path], ...], machine: Machine
) -> tuple[Generator, PerSampleGradients]:
    """The model, and gradients that passed their self-test on it.

    In simulation one process serves many rounds and sites; in deployment every message starts a new process.
    """
    if machine.checkpointing:
        _return_freed_memory()
    generator = Generator(options, dict(local), machine.device)
    computed = GRADIENTS[machine.gradients](generator, checkpointing=machine.checkpointing)
    check_gradients(generator, computed)
    return generator, computed


def _return_freed_memory() -> None:
    """Have glibc give freed tensors of 1 MB or more back to the system at once.

    By itself it keeps blocks of up to 32 MB in a heap that fragments, and a step that computes its activations anew
    takes four times the memory of its tensors. Without glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**20)
