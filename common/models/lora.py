"""Which factors of a LoRA adapter ``B A`` travel, and which of them a round trains (RoLoRA, arXiv 2409.02346).

Names are all it takes, so a side without torch can tell what an adapter must hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_A, _B = "lora_A", "lora_B"

_TRAINED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "ffa": ((_B,),),
    "plain": ((_A, _B),),
    "alternating": ((_B,), (_A,)),
}
"""Factors that are trained in the first, second, ... round of a variant; then it begins again."""


def cycle(lora: str) -> int:
    """Rounds after which ``lora`` trains the same factors again."""
    return len(_TRAINED[lora])


def trained_names(lora: str, names: Iterable[str], server_round: int) -> list[str]:
    """Names of the parameters that a round trains, and that a site answers with.

    Parameters
    ----------
    lora
        A variant, as in ``generator.lora`` of a study.
    names
        Parameters of the adapter, such as those that travel.
    server_round
        Counted from 1.

    Returns
    -------
    list of str
        Sorted.
    """
    rounds = _TRAINED[lora]
    return _of_factors(names, rounds[(server_round - 1) % len(rounds)])


def travelling_names(lora: str, names: Iterable[str]) -> list[str]:
    """Names of the parameters that any round trains; the others stay at their public initial values. Sorted."""
    return _of_factors(names, [factor for factors in _TRAINED[lora] for factor in factors])


def _of_factors(names: Iterable[str], factors: Iterable[str]) -> list[str]:
    marks = [f".{factor}." for factor in factors]
    return sorted(name for name in names if any(mark in name for mark in marks))
