"""What a bundle is made of: a finished run's corpus, counted and checked, row by row.

The weight of a text. A corpus has whole texts, and perhaps holes, so the shares of its codes are only about those of
the noisy sizes that quotas go by (profile and votes together). With the weights they are the same: a text under code c
weighs (share of c in the sizes) / (share of c in the corpus). Weights add up to the number of texts. They are made of
noisy counts alone and cost no privacy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.study import Study
from server.bundle import files
from server.corpus import iterate_corpus, text_id
from server.summary import Sample, Summary
from server.workspace import Workspace

Counts = NDArray[np.int64]
Row = dict[str, Any]


@dataclass(frozen=True)
class FinishedCorpus:
    """A run's corpus, counted and checked; its texts stay on disk.

    Attributes
    ----------
    counts, weights
        Texts of each code, and the weight of each of them, ``(codes,)``.
    samples
        The texts that the card shows.
    """

    workspace: Workspace
    study: Study
    counts: Counts
    weights: Sequence[float]
    samples: Sequence[Sample]

    @property
    def size(self) -> int:
        """Number of texts."""
        return int(self.counts.sum())

    def rows(self) -> Iterator[Row]:
        """The rows of both formats, one by one."""
        names, size = files.columns(self.study.codes), self.size
        for number, text in enumerate(iterate_corpus(self.workspace, self.study.codes)):
            values = self.study.codes.combinations[text.code]
            cells = (text_id(number, size), text.text, *values, self.weights[text.code])
            yield dict(zip(names, cells, strict=True))


def counted(workspace: Workspace, study: Study, summary: Summary) -> FinishedCorpus:
    """Count a run's corpus.

    Raises
    ------
    DataError
        If it can't be read, or isn't the one of the summary.
    """
    if len(summary.codes) != len(study.codes):
        raise DataError(f"{workspace.summary_json}: has {len(summary.codes)} codes, the study {len(study.codes)}")
    counts, samples = np.zeros(len(study.codes), dtype=np.int64), []
    shown = files.sample_rows(sum(code.made for code in summary.codes))
    for number, text in enumerate(iterate_corpus(workspace, study.codes)):
        counts[text.code] += 1
        if number in shown:
            samples.append(Sample(label=study.codes.label(text.code), text=text.text))
    for code, made in zip(summary.codes, counts, strict=True):
        if code.made != made:
            raise DataError(
                f"{workspace.corpus_jsonl}: has {made} texts of code {code.label!r}, summary.json {code.made}; one of "
                "the files was changed"
            )
    # A run of an earlier version knows its profile only.
    sizes = np.array([code.profile if code.size is None else code.size for code in summary.codes], dtype=np.int64)
    return FinishedCorpus(workspace, study, counts, code_weights(sizes, counts), samples)


def code_weights(sizes: Counts, counts: Counts) -> list[float]:
    """Weight of a text of each code, ``(codes,)``; 1 for all if the sizes have nothing under the codes with texts.

    Parameters
    ----------
    sizes
        Noisy units of each code, int64 ``(codes,)``; negative counts are noise around nothing.
    counts
        Texts of each code in the corpus.
    """
    shares = [max(0, int(count)) if made else 0 for count, made in zip(sizes, counts, strict=True)]
    whole, size = sum(shares), int(counts.sum())
    if not whole:
        return [1.0] * len(shares)
    # In integers until the end: no total is too large.
    return [size * share / (whole * int(made)) if made else 1.0 for share, made in zip(shares, counts, strict=True)]
