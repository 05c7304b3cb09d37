"""A second accountant, so that an auditor need not trust the first: numpy and scipy, no line shared with dp-accounting.

It takes mechanisms as a ledger writes them (`common.privacy.accounting.describe`) and gives an upper bound of the
(epsilon, delta) of all of them composed, for data sets that differ by one unit, added or removed.

    ledger = [
        {"mechanism": "subsampled-gaussian", "noise_multiplier": 1.0, "sample_rate": 0.064, "steps": 47},
        {"mechanism": "discrete-gaussian", "scale": 8.0, "cells_per_unit": 1},
    ]
    epsilon(ledger, delta=1e-4)        # at most this
    delta(ledger, epsilon=2.0)

How it works. With output distributions P and Q on two neighbours, the privacy loss is L = log P/Q under P, and
delta(epsilon) = E[max(0, 1 - e^(epsilon - L))]. Losses of independent or adaptive releases add up. So:

1. Grid. Outputs are cut into pieces where L crosses a multiple of ``interval``. A piece's mass goes to the two grid
   points around it, in the shares that keep its mass under P and under Q. As Q/P = e^-L and delta is convex in e^-L of
   every release, spreading them never lowers delta. This connects the dots of delta as a function of e^epsilon
   (Doroshenko, Ghazi, Kamath, Kumar & Manurangsi 2022), by masses instead of second differences, which would cancel.
   What lies above the grid becomes an infinite loss, what lies below moves up to it.
2. Sum. Losses are added by powers of a Fourier transform on a window that a Chernoff bound picks. What may wrap around
   from above it is added to delta, and so is the transform's rounding.

Both directions are computed and the larger one counts. A step on a Poisson sample is dominated by the pair
(1-q) N(0, s^2) + q N(1, s^2) against N(0, s^2), or its reverse (Zhu, Dong & Wang 2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.special import logsumexp, ndtr

from common.errors import PrivacyError

SMALLEST_DELTA = 1e-12
"""Below it a Fourier transform in float64 has nothing to say."""

MOST_CELLS = 2**24
"""Grid points at most: about a gigabyte of memory and up to half a minute."""

_FIELDS: dict[str, dict[str, tuple[type, float, float]]] = {
    "subsampled-gaussian": {
        "noise_multiplier": (float, 0.01, 1e6),
        "sample_rate": (float, 1e-12, 1),
        "steps": (int, 1, 1e9),
    },
    "discrete-gaussian": {"scale": (float, 0.01, 5e5), "cells_per_unit": (int, 1, 1e9)},
}
"""The fields of every mechanism, each with its type, smallest and largest value."""

_DEVIATIONS = 10.0
"""The grid ends where outputs further out have a mass of 1e-23."""

_ALIASED = 1e-16
"""What a Chernoff bound leaves on either side of the window."""

_RESOLUTION = 1e-7
"""Epsilon is searched to this."""


@dataclass(frozen=True, eq=False)
class _Loss:
    """Privacy loss of one release on the grid: ``masses[j]`` lies at ``(first + j) * interval``."""

    first: int
    masses: NDArray[np.float64]
    infinite: float = 0.0
    times: int = 1

    def points(self, interval: float, start: int = 0) -> NDArray[np.float64]:
        """Where the masses from ``start`` on lie."""
        return np.asarray((self.first + np.arange(start, self.masses.size)) * interval)

    def delta(self, epsilon: float, interval: float) -> float:
        """E[max(0, 1 - e^(epsilon - L))]."""
        start = min(max(math.floor(epsilon / interval) - self.first, 0), self.masses.size)
        lost = np.maximum(-np.expm1(epsilon - self.points(interval, start)), 0.0)
        return min(1.0, self.infinite + float(self.masses[start:] @ lost))


def epsilon(mechanisms: Sequence[Mapping[str, Any]], delta: float, interval: float = 1e-4) -> float:
    """Upper bound of epsilon at ``delta`` of all ``mechanisms`` composed, one unit added or removed.

    Parameters
    ----------
    mechanisms
        What `common.privacy.accounting.describe` writes, in any order:
        ``{"mechanism": "subsampled-gaussian", "noise_multiplier": s, "sample_rate": q, "steps": T}`` or
        ``{"mechanism": "discrete-gaussian", "scale": s, "cells_per_unit": c}``.
    delta
        Below 1 and at least `SMALLEST_DELTA`; with over a thousand releases at least 1e-15 for each.
    interval
        Distance of the grid's points. A larger one takes less time and gives a larger, still valid epsilon.

    Raises
    ------
    PrivacyError
        If a value has no meaning, delta is smaller than rounding allows, or the grid needs over `MOST_CELLS` points.
    """
    accepted = f"a number of {SMALLEST_DELTA:g} to below 1, above what rounding hides,"
    _require("delta", delta, _is_number(delta, SMALLEST_DELTA, 1) and delta < 1, accepted)
    sums = _both_directions(mechanisms, interval)
    hidden = max(total.infinite for total in sums)
    _require("delta", delta, delta >= 2 * hidden, f"at least {2 * hidden:.2g}, above what rounding hides,")
    if _larger_delta(sums, 0.0, interval) <= delta:
        return 0.0
    low, high = 0.0, max(total.points(interval)[-1] for total in sums)
    while high - low > _RESOLUTION:
        middle = (low + high) / 2
        low, high = (low, middle) if _larger_delta(sums, middle, interval) <= delta else (middle, high)
    return float(high)


def delta(mechanisms: Sequence[Mapping[str, Any]], epsilon: float, interval: float = 1e-4) -> float:
    """Upper bound of delta at ``epsilon`` of all ``mechanisms`` composed, one unit added or removed.

    Parameters
    ----------
    mechanisms, interval
        As for `epsilon`.
    epsilon
        At least 0. A delta below about 1e-12 is no longer told apart from rounding; the bound stays above both.

    Raises
    ------
    PrivacyError
        As for `epsilon`.
    """
    _require("epsilon", epsilon, _is_number(epsilon, 0, 1e9), "a number of 0 to 1e+09")
    return _larger_delta(_both_directions(mechanisms, interval), float(epsilon), interval)


def _larger_delta(sums: list[_Loss], epsilon: float, interval: float) -> float:
    return max(total.delta(epsilon, interval) for total in sums)


def _both_directions(mechanisms: Sequence[Mapping[str, Any]], interval: float) -> list[_Loss]:
    """The composed loss when the unit is removed, and when it is added."""
    _require("interval", interval, _is_number(interval, 1e-6, 1), "a number of 1e-06 to 1")
    some = isinstance(mechanisms, Sequence) and len(mechanisms) > 0
    _require("mechanisms", mechanisms, some, "a list of at least one mechanism")
    pairs = [_losses(mechanism, interval) for mechanism in mechanisms]
    # If every mechanism is symmetric, both directions are the same objects, and summed once.
    return [_summed(losses, interval) for losses in dict.fromkeys(zip(*pairs, strict=True))]


def _losses(mechanism: Mapping[str, Any], interval: float) -> tuple[_Loss, _Loss]:
    """Loss of one described mechanism when the unit is removed, and when it is added."""
    known = isinstance(mechanism, Mapping) and mechanism.get("mechanism") in list(_FIELDS)
    _require("mechanism", mechanism, known, " or ".join(_FIELDS))
    fields = _FIELDS[mechanism["mechanism"]]
    accepted = f"exactly the fields mechanism, {', '.join(fields)}"
    _require("mechanism", dict(mechanism), set(mechanism) == {"mechanism", *fields}, accepted)
    for name, (kind, least, most) in fields.items():
        holds = _is_number(mechanism[name], least, most) and isinstance(mechanism[name], (int, kind))
        accepted = f"a {'whole ' if kind is int else ''}number of {least:g} to {most:g}"
        _require(name, mechanism[name], holds, accepted)
    if mechanism["mechanism"] == "discrete-gaussian":
        loss = _discrete(float(mechanism["scale"]), mechanism["cells_per_unit"], interval)
        return loss, loss
    s, q = float(mechanism["noise_multiplier"]), float(mechanism["sample_rate"])
    return _subsampled(s, q, mechanism["steps"], interval)


def _subsampled(s: float, q: float, steps: int, interval: float) -> tuple[_Loss, _Loss]:
    """``steps`` Gaussians, each on a Poisson sample; y is the output along the unit's gradient, in units of C."""
    log_out, log_in = (math.log1p(-q) if q < 1 else -math.inf), math.log(q)
    ends = np.array([-_DEVIATIONS * s, 1 + _DEVIATIONS * s])
    # log((1-q) + q N(1)/N(0)) rises with y. It is the loss when the unit is removed, and minus the loss when added.
    reach = np.logaddexp(log_out, log_in + (2 * ends - 1) / (2 * s * s)) / interval
    first, last = math.floor(reach[0]), math.ceil(reach[1]) + 1
    _require_cells(last - first, interval)
    lower = np.arange(first, last)
    grid = np.arange(first, last + 1) * interval
    with np.errstate(divide="ignore", invalid="ignore"):
        cuts = s * s * (grid - log_in + np.log(-np.expm1(log_out - grid))) + 0.5
    cuts[grid <= log_out] = -np.inf
    without, within = _piece_masses(cuts / s), _piece_masses((cuts - 1) / s)
    mixed = (1 - q) * without + q * within
    # Differences of tails that are almost equal lose digits: measured against 60 digits, up to a third of this.
    rounding = 4 * np.finfo(float).eps * (_DEVIATIONS + 1 / s) / (s * interval)
    loss = _log_ratio(mixed, without)[1:-1]
    removed = _on_grid(mixed[1:-1], loss + rounding, lower, interval)
    added = _on_grid(without[1:-1], _log_ratio(without, mixed)[1:-1] + rounding, -lower - 1, interval)
    # The first and the last piece are the tails beyond the grid.
    removed.masses[0] += mixed[0]
    added.masses[0] += without[-1]
    return (
        _Loss(removed.first, removed.masses, float(mixed[-1]), steps),
        _Loss(added.first, added.masses, float(without[0]), steps),
    )


def _discrete(scale: float, cells: int, interval: float) -> _Loss:
    """``cells`` cells that move by 1 under discrete Gaussian noise; the same in both directions."""
    reach = math.ceil(_DEVIATIONS * scale) + 1
    noise = np.arange(-reach, reach + 1, dtype=np.float64)
    weights = np.exp(-(noise**2) / (2 * scale * scale))
    losses = (2 * noise + 1) / (2 * scale * scale)
    _require_cells((losses[-1] - losses[0]) / interval, interval)
    loss = _on_grid(weights / weights.sum(), losses, np.floor(losses / interval).astype(np.int64), interval)
    # A discrete tail is below the Gaussian's one step further in (Canonne, Kamath & Steinke 2020, proposition 25).
    return _Loss(loss.first, loss.masses, 2 * float(ndtr(-_DEVIATIONS)), cells)


def _piece_masses(cuts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard normal masses between rising ``cuts`` and beyond them, each from the nearer tail to keep its digits."""
    edges = np.concatenate(([-np.inf], cuts, [np.inf]))
    low, high = edges[:-1], edges[1:]
    return np.asarray(np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low)))


def _log_ratio(masses: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log of P-mass over Q-mass; infinite where the latter is so small that a float has lost digits."""
    with np.errstate(divide="ignore"):
        return np.where(others > 1e-290, np.log(masses) - np.log(np.maximum(others, 1e-290)), np.inf)


def _on_grid(
    masses: NDArray[np.float64], losses: NDArray[np.float64], cells: NDArray[np.int64], interval: float
) -> _Loss:
    """Spread each piece, of log P/Q ``losses``, over the grid points ``cells`` and ``cells + 1`` around it (step 1)."""
    # The share going up, u, keeps the mass under Q: u e^-interval + (1 - u) = e^-over.
    over = np.clip(losses - cells * interval, 0.0, interval)
    up = masses * np.expm1(-over) / math.expm1(-interval)
    first = int(cells.min())
    size = int(cells.max()) - first + 2
    down: NDArray[np.float64] = np.bincount(cells - first, masses - up, size).astype(np.float64)
    return _Loss(first, down + np.bincount(cells - first + 1, up, size))


def _summed(losses: Sequence[_Loss], interval: float) -> _Loss:
    """All ``losses`` added up, each as many times as it says (step 2)."""
    first = math.floor(-_reach(losses, interval, -1) / interval)
    needed = math.ceil(_reach(losses, interval, 1) / interval) - first + 1
    _require_cells(needed, interval)
    size = int(fft.next_fast_len(needed, real=True))
    spectrum: NDArray[np.complex128] = np.ones(size // 2 + 1, dtype=np.complex128)
    for loss in losses:
        wrapped = np.bincount((loss.first + np.arange(loss.masses.size)) % size, loss.masses, size)
        spectrum *= fft.rfft(wrapped) ** loss.times
    masses = np.maximum(np.roll(fft.irfft(spectrum, size), -(first % size)), 0.0)
    infinite = -math.expm1(sum(loss.times * math.log1p(-loss.infinite) for loss in losses))
    # A power multiplies the rounding of what it is taken of; measured against closed forms, up to a quarter of this.
    rounding = 2 * np.finfo(float).eps * (sum(loss.times for loss in losses) + math.log2(size))
    return _Loss(first, masses, infinite + _ALIASED + float(rounding))


def _reach(losses: Sequence[_Loss], interval: float, sign: int) -> float:
    """What the sum, or minus it, exceeds with probability `_ALIASED` at most (Chernoff: every tilt gives a bound)."""
    parts = [(loss.times, sign * loss.points(interval), loss.masses) for loss in losses]
    variance = sum(times * float(masses @ (points - masses @ points) ** 2) for times, points, masses in parts)
    # The best tilt of a Gaussian sum is half of the first; skewed sums need less. The bound falls, then rises.
    reach, tilt = math.inf, 2 * math.sqrt(-2 * math.log(_ALIASED) / variance)
    while (bound := (sum(t * _log_mean(m, tilt * p) for t, p, m in parts) - math.log(_ALIASED)) / tilt) < reach:
        reach, tilt = bound, tilt / 2
    return reach


def _log_mean(masses: NDArray[np.float64], exponents: NDArray[np.float64]) -> float:
    return float(logsumexp(exponents, b=masses))


def _is_number(value: Any, least: float, most: float) -> bool:
    """Whether ``value`` is a number of ``least`` to ``most``; nan and True aren't."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def _require_cells(needed: float, interval: float) -> None:
    coarser = interval * needed / MOST_CELLS
    accepted = f"a coarser one (from about {coarser:.2g}), as these mechanisms need {needed:.3g} grid points,"
    _require("interval", interval, needed <= MOST_CELLS, accepted)


def _require(name: str, value: Any, holds: bool, accepted: str) -> None:
    if not holds:
        raise PrivacyError(f"{name} is {value!r}; {accepted} is accepted")
