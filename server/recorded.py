"""A sampler whose texts are on disk as they come: a run that was killed goes on after the last of them.

texts = RecordedSampler(sampler, workspace, run_id).sample(sizes, on_text, series="pool")
"""

from __future__ import annotations

import shutil

import numpy as np
from numpy.typing import NDArray

from server.candidate_log import CandidateLog
from server.generation import OnText, SyntheticText, TextSampler
from server.workspace import Workspace


class RecordedSampler:
    """Texts of one run.

    Parameters
    ----------
    sampler
        Of the run's own model.
    run_id
        Another run's texts, should they lie in the folder, aren't taken for this one's.
    """

    def __init__(self, sampler: TextSampler, workspace: Workspace, run_id: str) -> None:
        self.plain = sampler
        self._folder, self._run_id = workspace.generation, run_id

    def sample(self, wanted: NDArray[np.int64], on_text: OnText, *, series: str) -> list[SyntheticText]:
        """As `TextSampler.sample`; what an earlier attempt has written isn't generated again."""
        self._folder.mkdir(exist_ok=True)
        same = {"run": self._run_id, "series": series, "wanted": wanted.tolist()}
        with CandidateLog(self._folder / f"{series}.jsonl", same) as record:
            return self.plain.sample(wanted, on_text, series=series, record=record)

    def forget(self) -> None:
        """Remove what was kept: the run has it elsewhere."""
        shutil.rmtree(self._folder, ignore_errors=True)
