"""A cell as its chain of steps: the paper's drawing, in pieces that are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from server.experiments.assembling import Corpus, RealCorpus
from server.experiments.attacks import Attacks
from server.experiments.cache import Cache, Made, OnProgress, Step
from server.experiments.judging import Judgement
from server.experiments.pooling import pools_and_votes
from server.experiments.pretraining import pretrained
from server.experiments.situation import Situation
from server.experiments.tuning import tuning
from server.experiments.voting import Vote


def chain_of(situation: Situation, data: Path) -> Sequence[Step]:
    """All steps of a cell with a seed, in order.

    Parameters
    ----------
    data
        Folder of the public text that models are pre-trained on.
    """
    if situation.cell.source == "documents":
        return (RealCorpus(situation), Judgement(situation))
    return (
        *pretrained(situation, data),
        *tuning(situation),
        *_attacks(situation),
        *pools_and_votes(situation, Vote),
        Corpus(situation),
        Judgement(situation),
    )


def _attacks(situation: Situation) -> Sequence[Step]:
    """Where leaks are measured and there is a model that learnt."""
    wanted = "leaks" in situation.experiment.judging.measures and situation.cell.trains != "nobody"
    return (Attacks(situation),) if wanted else ()


def missing(chain: Sequence[Step], cache: Cache) -> dict[str, Step]:
    """Steps that are to be made, each under a key: chains that share a step share its key.

    Raises
    ------
    UserError, PolicyRefusal
        If a step can't be made as its cell has it.
    """
    made: dict[str, Made] = {}
    left: dict[str, Step] = {}
    for step in chain:
        found = cache.find(step, made)
        if found is None:
            key = cache.key(step, made)
            left[key] = step
            # What it will be isn't known; that it will be one and the same is.
            found = Made(Path(), f"to be made: {key}", 0.0)
        made[step.name] = found
    return left


def run_chain(
    chain: Sequence[Step],
    cache: Cache,
    on_step: Callable[[Step], None] = lambda _: None,
    on_progress: OnProgress = lambda _done, _total: None,
) -> dict[str, Made]:
    """Make what isn't there; all results by name."""
    made: dict[str, Made] = {}
    for step in chain:
        if cache.find(step, made) is None:
            on_step(step)
            step.progress = on_progress
        made[step.name] = cache.make(step, made)
    return made
