"""Does a corpus tell which documents it was made from? Each answer beside that for as many held-out documents.

A corpus as near to documents it was made from as to documents it never saw gives 0.5 everywhere. These are smoke
tests: a number that is bad shows a leak, one that is good doesn't show that there is none. The guarantee is epsilon.

    nearer_share(distances_to_training, distances_to_holdout)    # 0.5 is good, 1 a copy
    attack = membership(scores_of_training, scores_of_holdout)   # AUC 0.5 is good
    exposure(score_of_canary, scores_of_references)              # bits; 1 or so is chance
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.site.audit.substrings import longest_shared
from server.evaluation.intervals import Estimate, Floats, of_mean, of_resamples

FALSE_POSITIVES = 0.01
FEWEST_NON_MEMBERS = 100
"""Held-out documents, without which one in a hundred can't be told."""

_TIE = 1e-9
_RESAMPLES = 400


def nearer_share(to_training: Floats, to_holdout: Floats) -> Estimate:
    """Share of texts with the smaller number on the training side; ties count half (DCR share, NNDR share).

    Parameters
    ----------
    to_training, to_holdout
        Of each text, ``(texts,)``: the distance to the nearest document (DCR), or its ratio to the second nearest
        (NNDR, see `ratios`), of as many documents on both sides.
    """
    difference = to_training - to_holdout
    points = np.where(abs(difference) <= _TIE, 0.5, (difference < 0).astype(np.float64))
    return of_mean(points)


def ratios(distances: Floats) -> Floats:
    """Nearest over second nearest distance of each row ``(texts, 2)``; 1 where both are 0. Small is suspicious."""
    nearest, second = distances.T
    return np.where(second > _TIE, nearest / np.maximum(second, _TIE), 1.0)


@dataclass(frozen=True)
class Attack:
    """How well members are told from others.

    Attributes
    ----------
    auc
        Chance that a member has a higher score than a non-member; 0.5 is a guess.
    tpr
        Share of the members found when one non-member in a hundred is taken for one (Carlini et al. 2022): what the
        attack does to a few, which the AUC hides. None with fewer than `FEWEST_NON_MEMBERS` non-members.
    """

    auc: Estimate
    tpr: Estimate | None


def membership(members: Floats, others: Floats, seed: int = 0) -> Attack:
    """Membership inference by a score that should be higher for members, with intervals.

    Raises
    ------
    DataError
        If there are no members or no others.
    """
    if not len(members) or not len(others):
        raise DataError(f"membership: {len(members)} members and {len(others)} others; at least one of each is needed")
    return Attack(
        auc_estimate(members, others),
        true_positives_estimate(members, others, seed) if len(others) >= FEWEST_NON_MEMBERS else None,
    )


def auc(members: Floats, others: Floats) -> float:
    """Chance that a member's score is higher than another's; ties count half."""
    return float(_above(members, others).mean())


def auc_estimate(members: Floats, others: Floats) -> Estimate:
    """The same with an interval (DeLong et al. 1988)."""
    of_members, of_others = _above(members, others), _above(-others, -members)
    deviation = np.sqrt(of_members.var() / len(members) + of_others.var() / len(others))
    return Estimate.spread(auc(members, others), float(deviation), least=0.0, most=1.0)


def true_positives_estimate(members: Floats, others: Floats, seed: int = 0) -> Estimate:
    """`true_positives` with an interval from resampled documents."""
    chance = np.random.default_rng(seed)
    found = [
        true_positives(chance.choice(members, len(members)), chance.choice(others, len(others)))
        for _ in range(_RESAMPLES)
    ]
    return of_resamples(true_positives(members, others), np.array(found))


def _above(scores: Floats, others: Floats) -> Floats:
    """Share of ``others`` that each score is above; a tie is half."""
    ordered = np.sort(others)
    below, not_above = (np.searchsorted(ordered, scores, side=side) for side in ("left", "right"))
    return np.asarray((below + not_above) / (2 * len(others)))


def true_positives(members: Floats, others: Floats, rate: float = FALSE_POSITIVES) -> float:
    """Share of members above the score that a share ``rate`` of the others is above, at most."""
    allowed = int(rate * len(others))
    place = len(others) - 1 - allowed
    threshold = np.partition(others, place)[place]
    return float((members > threshold).mean())


def exposure(canary: float, references: Floats) -> float:
    """Bits by which a planted text stands out (Carlini et al. 2019): log2 of the references over the canary's rank.

    For test runs: a canary that had a part in the run, among ``references`` made the same way that hadn't. Chance gives
    1.44 bits on average, and the most that can be seen is log2 of one more than the references.

    Parameters
    ----------
    canary
        Its score, higher where the corpus or the model knows it better.
    references
        Theirs, ``(n,)``. Ties are on the canary's side half the time.

    Raises
    ------
    DataError
        If there are none.
    """
    if not len(references):
        raise DataError("exposure: no references; at least one text that had no part in the run is needed")
    rank = 1 + float((references > canary).sum()) + float((references == canary).sum()) / 2
    return float(np.log2((len(references) + 1) / rank))


def mean_exposure(canaries: Floats, references: Floats) -> float:
    """Bits, over several canaries with the same references; see `exposure`."""
    return float(np.mean([exposure(float(score), references) for score in canaries]))


def shared_characters(texts: Sequence[str], documents: Sequence[str]) -> NDArray[np.int64]:
    """Characters of the longest run that each text shares with any document, int64 ``(texts,)``; case doesn't count.

    0 for runs of fewer than 16. Texts as they look.
    """
    folded = [[text.casefold() for text in side] for side in (texts, documents)]
    return longest_shared(*folded).lengths


def canary_scores(canaries: Sequence[str], corpus: Sequence[str]) -> Floats:
    """How much of each canary is in the corpus in one piece, 0 to 1: scores for `exposure`."""
    lengths = np.array([max(len(canary.casefold()), 1) for canary in canaries])
    return np.asarray(shared_characters(canaries, corpus) / lengths, dtype=np.float64)
