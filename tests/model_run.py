"""The folder of a finished run with a tiny model, from which more text can be made; no site was ever asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.models.generator import Generator
from common.protocol import CandidatePool
from common.study import Study
from server.checkpoint import Checkpoint, write_checkpoint
from server.corpus import CorpusText, write_ballots, write_corpus, write_pool, write_profiles
from server.report import write_summary
from server.summary import Summary
from server.workspace import Workspace, write_atomically
from tests.hospitals import small_study

SIZES = (60, 30, 10, 0)
"""Units of each code at both sites, with noise that happens to be nothing."""


def model_run(
    folder: Path,
    base: Path,
    *,
    sizes: Sequence[int] = SIZES,
    released: Sequence[CorpusText] = (),
    run_id: str = "0123456789abcdef",
    **changes: Mapping[str, Any],
) -> Workspace:
    """A finished run of `small_study` with changes, by a strong site and a weak one.

    Parameters
    ----------
    sizes
        Noisy count of each code at each site.
    released
        The run's corpus.
    """
    study = Study.model_validate(small_study(base, **changes))
    space = Workspace(folder).create()
    adapter = Generator(study.generator).adapter()
    source = np.random.default_rng(0)
    trained = {name: source.normal(0, 0.1, value.shape).astype(np.float32) for name, value in adapter.items()}
    codes = np.repeat(np.arange(len(study.codes), dtype=np.int32), 2)
    profile = np.array(sizes, dtype=np.int64)
    write_atomically(space.study, study.canonical.encode())
    write_checkpoint(space, study, Checkpoint(round=study.training.rounds, adapter=trained))
    write_pool(space.pool, CandidatePool(tuple(f"candidate {i}" for i in range(codes.size)), codes))
    write_profiles(space.profiles, {"north": profile, "east": profile})
    # One vote of each unit, as the study's K of 1 has it: sizes by votes and by profile are the same.
    write_ballots(space.ballots, {"east": np.repeat(profile, 2) // 2})
    write_corpus(space, study.codes, released)
    summary = {
        "run_id": run_id, "study": study.name, "study_sha256": study.sha256, "attributes": study.codes.names,
        "unit": "record", "epsilon": 7.9, "delta": 1e-4, "votes_per_unit": study.votes_per_unit,
        "selection": "simplex", "sites": (), "codes": (), "pool_size": codes.size, "corpus_size": len(released),
        "dropped": {}, "rounds": (), "samples": (), "seconds": {}, "files": {}, "software": {}, "warnings": (),
    }  # fmt: skip
    write_summary(space, Summary.model_validate(summary))
    return space
