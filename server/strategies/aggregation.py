"""How the adapters of a round become one, and what their updates say. Pure functions of noised values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from common.protocol import Adapter
from common.study import Study


class SiteUpdate(BaseModel):
    """One site's change of the adapter in a round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    site: str = Field(description="Name of the site.")
    norm: float = Field(description="L2 norm of its change.")
    cosine: float | None = Field(description="Cosine with the mean change of the other sites; null if it is alone.")


class RoundReport(BaseModel):
    """What a round's updates say; made of public numbers and noised values, so it costs no privacy.

    ``signal_to_noise`` is the best case: in every step the clipped gradients of a whole expected batch have norm C and
    point the same way, at every site. Then the steps' mean signal over the sites is C, the noise of a step's mean has
    norm ``C sqrt(d sum(sigma_i^2)) / (B n)``, and over E steps the ratio grows by ``sqrt(E)``. What training reaches
    is a share of it. ``shared`` is what is seen: as the sites' noises are independent, the mean inner product of two
    sites' changes, over their mean squared norm, estimates which share of a change the sites have in common. It can't
    tell signal from what sites share for other reasons (an optimiser's moments, say), and scatters by about
    ``1 / sqrt(d)``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    round: int = Field(description="Number of the round.")
    updates: tuple[SiteUpdate, ...] = Field(description="Every site that gave a valid adapter.")
    signal_to_noise: float = Field(
        description="Most that the round's signal can be over its noise; from public numbers."
    )
    shared: float | None = Field(description="Share of an update's energy that the sites have in common; null if one.")

    def __str__(self) -> str:
        sites = ", ".join(
            f"{u.site} {u.norm:.3g}" + ("" if u.cosine is None else f" (cosine {u.cosine:+.2f})") for u in self.updates
        )
        shared = "" if self.shared is None else f", shared {max(self.shared, 0):.1%}"
        return f"round {self.round}: signal/noise at most {self.signal_to_noise:.2g}{shared}; update norms: {sites}"


def weighted_mean(adapters: Sequence[Adapter], weights: Sequence[float]) -> Adapter:
    """Mean of adapters of equal names and shapes, float32; weights are public and needn't sum to 1.

    With frozen A the mean of the B is exact: mean(B_i) A = mean(B_i A).
    """
    shares = np.asarray(weights, dtype=np.float64)
    shares = shares / shares.sum()
    return {
        name: np.tensordot(shares, np.stack([a[name] for a in adapters]), axes=1).astype(np.float32)
        for name in adapters[0]
    }


def trimmed_mean(adapters: Sequence[Adapter], trim: float) -> Adapter:
    """Mean per weight, without the ``int(trim * n)`` largest and smallest of the n values (Yin et al. 2018), float32.

    So many sites may send what they like: the result stays within what the others sent.
    """
    cut = int(trim * len(adapters))
    kept = slice(cut, len(adapters) - cut)
    return {
        name: np.sort(np.stack([a[name] for a in adapters]), axis=0)[kept]
        .mean(axis=0, dtype=np.float64)
        .astype(np.float32)
        for name in adapters[0]
    }


def signal_to_noise(study: Study, noise_multipliers: Sequence[float], weights: int) -> float:
    """Most that a round's mean signal can be over the norm of its noise; see `RoundReport`.

    Parameters
    ----------
    noise_multipliers
        sigma_i of each site that answered.
    weights
        d, weights trained in the round.
    """
    training, sites = study.training, len(noise_multipliers)
    noise = math.sqrt(weights * sum(sigma**2 for sigma in noise_multipliers)) / sites
    return math.sqrt(training.steps) * training.batch_size / noise


def report_round(
    server_round: int, sent: Adapter, received: Mapping[str, Adapter], signal_to_noise: float
) -> RoundReport:
    """Compare the sites' changes of the weights that they trained.

    Parameters
    ----------
    sent
        The adapter that the sites began with; it may hold more than they trained.
    received
        Adapter by site, all of equal names.
    """
    changes = {site: _flat(adapter, sent) for site, adapter in received.items()}
    total = np.sum(list(changes.values()), axis=0)
    squares = {site: float(change @ change) for site, change in changes.items()}
    updates = tuple(
        SiteUpdate(site=site, norm=math.sqrt(squares[site]), cosine=_cosine(change, total - change, len(changes)))
        for site, change in changes.items()
    )
    return RoundReport(
        round=server_round, updates=updates, signal_to_noise=signal_to_noise, shared=_shared(total, squares)
    )


def _flat(adapter: Adapter, sent: Adapter) -> NDArray[np.float64]:
    return np.concatenate([(adapter[name].astype(np.float64) - sent[name]).ravel() for name in sorted(adapter)])


def _cosine(change: NDArray[np.float64], others: NDArray[np.float64], sites: int) -> float | None:
    norms = float(np.linalg.norm(change) * np.linalg.norm(others))
    return None if sites < 2 or not norms else float(change @ others) / norms


def _shared(total: NDArray[np.float64], squares: Mapping[str, float]) -> float | None:
    sites, energy = len(squares), sum(squares.values())
    if sites < 2 or not energy:
        return None
    # |sum|^2 = sum |u|^2 + sum over ordered pairs.
    return (float(total @ total) - energy) / (sites * (sites - 1)) / (energy / sites)
