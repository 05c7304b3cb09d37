"""More text from a finished run. Post-processing of what it released: no hospital is asked, and no privacy is spent.

    report = generate_more(Path("fedcorpus-runs/demo/run"), 100_000)

Texts go to a folder of Parquet files, shard by shard, in memory that doesn't grow with them. It may be killed at any
time: texts of the shard that is being made are on disk as they come, and the same call goes on after the last of them.
No text of the run's corpus, or of an earlier generation that is still there, comes again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from common.errors import CheckpointError, GenerationError, UserError
from common.models.generator import Generator, check_adapter
from common.protocol import Adapter, adapter_bytes
from common.study import Study
from server.aggregate import quotas
from server.candidate_log import CandidateLog
from server.checkpoint import held, read_checkpoint
from server.corpus import iterate_corpus, read_ballots, read_pool, read_profiles, text_id
from server.filters import Drops
from server.generation import OnText, SyntheticText, TextSampler
from server.more.folder import (
    Folder,
    check_same,
    generations,
    read_state,
    read_texts,
    register,
    write_file,
    write_state,
)
from server.more.plan import run_sizes
from server.more.state import Settings, State
from server.summary import Summary
from server.verify import finished_run
from server.workspace import Workspace

TEXTS_PER_SHARD = 20_000

OnStep = Callable[[str, int, int], None]
"""Called with a phase ('earlier' texts are read, 'texts' are made), what is done of it, and of how many."""

PRIVACY = (
    "No privacy was spent: the texts come from what the run has released already (post-processing). The run's own "
    "epsilon and delta hold for them too."
)


class Report(BaseModel):
    """What a generation came to."""

    model_config = ConfigDict(frozen=True)

    folder: str = Field(description="Where the texts are.")
    run_id: str = Field(description="Name of the run.")
    study_sha256: str = Field(description="Hash of its study.")
    wanted: int = Field(description="Texts that were asked for.")
    texts: int = Field(description="Texts that were made.")
    files: int = Field(description="Parquet files that they are in.")
    missing: Mapping[str, int] = Field(description="Texts that couldn't be made, by code.")
    dropped: Mapping[str, int] = Field(description="Generated texts that weren't kept, by reason.")
    cut: int = Field(description="Texts that the length limit cut.")
    epsilon: float = Field(description="Joint epsilon of the run, unchanged.")
    delta: float = Field(description="Joint delta of the run, unchanged.")
    privacy: str = Field(default=PRIVACY, description="Why it is unchanged.")


def generate_more(
    run: Path,
    texts: int,
    out: Path | None = None,
    on_step: OnStep = lambda _phase, _done, _all: None,
    *,
    texts_per_shard: int = TEXTS_PER_SHARD,
) -> Report:
    """Make texts with the codes' proportions of a finished run, or go on with it.

    Parameters
    ----------
    run
        Folder of the run.
    texts
        How many, at least 1.
    out
        Folder for them; new, or of the same call before. Unset means one within the run's own.
    texts_per_shard
        Texts of a file, about. What counts is what the folder was begun with.

    Raises
    ------
    UserError
        If fewer than one text is asked for.
    DataError
        If the run isn't finished, or a file of it or of this generation is damaged.
    CheckpointError
        If the folder holds something else, or the run's adapter is gone.
    FederationError
        If another process generates in the same folder.
    GenerationError
        If the disk is full, or the model gives no usable text at all. What was written stays.
    """
    if texts < 1:
        raise UserError(f"generate: {texts} texts are asked for; at least 1 is needed")
    space = Workspace(run)
    study, summary = finished_run(space)
    adapter = _adapter(space, study, summary)
    settings = Settings(
        run_id=summary.run_id,
        study_sha256=summary.study_sha256,
        adapter_sha256=hashlib.sha256(adapter_bytes(adapter)).hexdigest(),
        texts=texts,
    )
    folder = Folder(out or space.more(texts))
    # Before anything is written into it.
    begun = _begun(folder, settings)
    generation = _Generation(space, study, adapter, folder, begun)
    if begun is None or not begun.finished:
        generation.go_on(settings, texts_per_shard, on_step)
    state = generation.state
    if not state.texts:
        raise GenerationError(f"generate: none of {texts} texts was usable; dropped: {Drops(Counter(state.dropped))}")
    return _report(folder, study, summary, state)


class _Generation:
    """One generation and what it needs."""

    def __init__(self, space: Workspace, study: Study, adapter: Adapter, folder: Folder, state: State | None) -> None:
        self._space, self._study, self._adapter, self._folder = space, study, adapter, folder
        self._state = state

    @property
    def state(self) -> State:
        """Where it stands."""
        if self._state is None:
            raise CheckpointError(f"{self._folder.root}: no generation was begun in it")
        return self._state

    def go_on(self, settings: Settings, texts_per_shard: int, on_step: OnStep) -> None:
        """Make what is missing, alone in its folder."""
        try:
            self._folder.root.mkdir(parents=True, exist_ok=True)
            with held(Workspace(self._folder.root)):
                self._state = _begun(self._folder, settings) or self._begin(settings, texts_per_shard)
                # A file that the state doesn't count yet.
                self._folder.file(len(self.state.files)).unlink(missing_ok=True)
                if not self.state.finished:
                    self._make(on_step)
        except (OSError, pa.ArrowException) as cause:
            made = self._state.texts if self._state else 0
            raise GenerationError(
                f"{getattr(cause, 'filename', None) or self._folder.root}: can't be written "
                f"({getattr(cause, 'strerror', None) or cause}), after {made} of {settings.texts} texts; what is there "
                "stays, and the same command goes on with it"
            ) from cause

    def _begin(self, settings: Settings, texts_per_shard: int) -> State:
        with held(self._space):
            series = register(self._space, self._folder)
        codes = read_pool(self._space.pool).codes
        sizes = run_sizes(self._study, read_profiles(self._space.profiles), read_ballots(self._space.ballots), codes)
        state = State.begin(settings, series, texts_per_shard, quotas(sizes, settings.texts))
        write_state(self._folder, state)
        return state

    def _make(self, on_step: OnStep) -> None:
        generator = Generator(self._study.generator)
        check_adapter(self._adapter, {name: value.shape for name, value in generator.adapter().items()})
        generator.load_adapter(self._adapter)
        earlier, count = self._earlier()
        sampler = TextSampler(generator, self._study, expected=count + self.state.settings.texts)
        sampler.remember(_counted(earlier, lambda done: on_step("earlier", done, count)))
        while not self.state.finished:
            before, wanted = self.state.texts, self.state.settings.texts
            self._shard(sampler, lambda made, _: on_step("texts", before + made, wanted))  # noqa: B023 - called within

    def _shard(self, sampler: TextSampler, on_text: OnText) -> None:
        state, folder = self.state, self._folder
        sampler.drops = Drops()
        with CandidateLog(folder.log, {**state.settings.model_dump(), "place": state.place}) as record:
            texts = sampler.sample(state.next_texts, on_text, series=state.place, record=record)
            if texts:
                whole = state.settings.texts
                ids = [f"{state.series}-{text_id(state.texts + number, whole)}" for number in range(len(texts))]
                write_file(folder.file(len(state.files)), self._study.codes, texts, ids)
            self._state = state.after(np.array([text.code for text in texts], dtype=np.int64), sampler.drops)
            write_state(folder, self._state)
            record.remove()

    def _earlier(self) -> tuple[Iterable[SyntheticText], int]:
        """Texts that are given already, in the run's corpus and in generations that are still there; and how many."""
        codes, parts = self._study.codes, [(self._folder, self.state)]
        for place in generations(self._space)[: self.state.series - 1]:
            folder = Folder(Path(place))
            state = read_state(folder) if folder.state.exists() else None
            if state is not None and state.settings.run_id == self.state.settings.run_id:
                parts.append((folder, state))
        released = (SyntheticText(text.text, text.code) for text in iterate_corpus(self._space, codes))
        files = (read_texts(folder, len(state.files), codes) for folder, state in parts)
        return chain(released, *files), self._study.corpus.size + sum(state.texts for _, state in parts)


def _begun(folder: Folder, settings: Settings) -> State | None:
    state = read_state(folder)
    if state is not None:
        check_same(folder, state, settings)
    return state


def _adapter(space: Workspace, study: Study, summary: Summary) -> Adapter:
    checkpoint = read_checkpoint(space, study, summary.study_sha256)
    if checkpoint.round != study.training.rounds or not checkpoint.adapter:
        raise CheckpointError(
            f"{space.checkpoint}: has the adapter of round {checkpoint.round}; that of round {study.training.rounds}, "
            "the run's last, is needed"
        )
    return checkpoint.adapter


def _counted(texts: Iterable[SyntheticText], on_done: Callable[[int], None]) -> Iterator[SyntheticText]:
    for number, text in enumerate(texts, start=1):
        yield text
        on_done(number)


def _report(folder: Folder, study: Study, summary: Summary, state: State) -> Report:
    missing = {
        study.codes.label(code): wanted - made
        for code, (wanted, made) in enumerate(zip(state.quotas, state.made, strict=True))
        if wanted > made
    }
    return Report(
        folder=str(folder.root),
        run_id=state.settings.run_id,
        study_sha256=state.settings.study_sha256,
        wanted=state.settings.texts,
        texts=state.texts,
        files=len(state.files),
        missing=missing,
        dropped=dict(state.dropped),
        cut=state.cut,
        epsilon=summary.epsilon,
        delta=summary.delta,
    )
