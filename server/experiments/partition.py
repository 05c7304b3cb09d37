"""How real documents are shared out to sites. Pure and seeded: the same seed shares out alike on every machine.

    split = partition(Partition(kind="dirichlet", by="topic", alpha=0.3), columns, 5000, seed=0)
    split.sites[0]          # document numbers of the first site, ascending
    split.strong            # numbers of the strong sites

Written here and not taken from flwr-datasets: that wants a `datasets` older than the one this project tests its bundles
with, works on that library's tables only, and knows no tiers, which the paper's non-IID case is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from common.configuration import Section
from common.errors import DataError

Numbers = NDArray[np.int64]
Columns = Mapping[str, Sequence[str]]

MOST_TRIES = 100
"""Draws of a Dirichlet partition until every site has enough."""


class Partition(Section):
    """Which site gets which documents, and which sites are strong."""

    name: str = Field(default="", description="What tables call it.")
    kind: Literal["iid", "strong-classes", "dirichlet", "natural"] = Field(
        default="iid",
        description="iid: by chance. strong-classes: strong sites hold documents of some values of a column only, weak "
        "sites all others (the paper's non-IID). dirichlet: shares of each value over the sites are drawn from a "
        "Dirichlet distribution. natural: a site for every value of a column.",
    )
    sites: int = Field(default=10, ge=1, description="Number of sites; with 'natural', of each value of the column.")
    strong_share: float = Field(default=0.3, ge=0, le=1, description="Share of the sites that are strong, rounded.")
    by: str | None = Field(default=None, description="The column that all kinds but 'iid' go by.")
    strong_values: tuple[str, ...] = Field(
        default=(),
        description="strong-classes: the values that strong sites hold. natural: the values that are strong.",
    )
    strong_classes: int | None = Field(
        default=None, ge=1, description="strong-classes: how many values, drawn by the seed, instead of naming them."
    )
    strong_most: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="strong-classes: largest share of these values' documents that strong sites get together.",
    )
    alpha: float = Field(default=0.5, gt=0, description="dirichlet: the smaller, the more sites differ.")
    growth: float = Field(
        default=0.0, ge=0, le=4, description="Sizes of sites: the i-th gets a share of i to this power; 0 is equal."
    )
    fewest: int = Field(default=1, ge=1, description="Fewest documents of a site.")

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Partition:
        if self.kind != "iid" and self.by is None:
            raise ValueError(f"by is missing; kind {self.kind!r} goes by a column")
        if self.kind == "strong-classes" and bool(self.strong_values) == (self.strong_classes is not None):
            raise ValueError("strong-classes needs either strong_values or strong_classes")
        if self.growth and self.kind in ("dirichlet", "natural"):
            raise ValueError(f"growth is {self.growth:g}; sizes of a {self.kind!r} partition come by themselves, use 0")
        return self


@dataclass(frozen=True)
class Split:
    """Every document is at one site.

    Attributes
    ----------
    sites
        Document numbers of each site, int64, ascending.
    strong
        Numbers of the strong sites.
    """

    sites: tuple[Numbers, ...]
    strong: frozenset[int]

    @property
    def weak(self) -> tuple[int, ...]:
        """Numbers of the weak sites."""
        return tuple(number for number in range(len(self.sites)) if number not in self.strong)


def partition(options: Partition, columns: Columns, documents: int, seed: int) -> Split:
    """Share documents out.

    Parameters
    ----------
    columns
        Column -> the value of each document.

    Raises
    ------
    DataError
        If a column or a value isn't there, or a site would get fewer documents than it must.
    """
    chance = np.random.default_rng(seed)
    values = _values(options, columns)
    split = _KINDS[options.kind](options, values, documents, chance)
    for number, site in enumerate(split.sites):
        if len(site) < options.fewest:
            raise DataError(
                f"partition {options.kind!r}: site {number + 1} of {len(split.sites)} would hold {len(site)} documents "
                f"and at least {options.fewest} are needed; take fewer sites or more documents"
            )
    return split


def _values(options: Partition, columns: Columns) -> Sequence[str]:
    if options.by is None:
        return ()
    if options.by not in columns:
        raise DataError(f"partition.by is {options.by!r}; the data has {sorted(columns)}")
    return columns[options.by]


def _iid(options: Partition, _: Sequence[str], documents: int, chance: np.random.Generator) -> Split:
    sites = _cut(chance.permutation(documents), _sizes(documents, options.sites, options.growth))
    return Split(sites, _drawn_strong(options, len(sites), chance))


def _strong_classes(options: Partition, values: Sequence[str], documents: int, chance: np.random.Generator) -> Split:
    chosen = _chosen_values(options, values, chance)
    held = np.isin(np.array(values, dtype=object), chosen)
    strong = _strong_count(options, options.sites)
    if not 0 < strong < options.sites:
        raise DataError(
            f"partition 'strong-classes': {strong} of {options.sites} sites would be strong; at least one of each "
            "tier is needed"
        )
    sizes = _sizes(documents, options.sites, options.growth)
    # As many as strong sites would have in an IID partition, or as many as they may.
    wanted = min(sum(sizes[:strong]), int(options.strong_most * np.count_nonzero(held)))
    of_values = chance.permutation(np.flatnonzero(held))
    rest = chance.permutation(np.concatenate([of_values[wanted:], np.flatnonzero(~held)]))
    sites = (
        *_cut(of_values[:wanted], _sizes(wanted, strong, options.growth)),
        *_cut(rest, _sizes(len(rest), options.sites - strong, options.growth)),
    )
    return Split(sites, frozenset(range(strong)))


def _dirichlet(options: Partition, values: Sequence[str], documents: int, chance: np.random.Generator) -> Split:
    places = {value: np.flatnonzero(np.array(values, dtype=object) == value) for value in sorted(set(values))}
    for _ in range(MOST_TRIES):
        owner = np.zeros(documents, dtype=np.int64)
        for own in places.values():
            shares = chance.dirichlet(np.full(options.sites, options.alpha))
            owner[own] = chance.choice(options.sites, size=len(own), p=shares)
        if np.bincount(owner, minlength=options.sites).min() >= options.fewest:
            break
    sites = tuple(np.flatnonzero(owner == site) for site in range(options.sites))
    return Split(sites, _drawn_strong(options, len(sites), chance))


def _natural(options: Partition, values: Sequence[str], documents: int, chance: np.random.Generator) -> Split:
    names = sorted(set(values))
    if unknown := sorted(set(options.strong_values) - set(names)):
        raise DataError(f"partition.strong_values has {unknown[0]!r}; column {options.by!r} has {names}")
    sites: list[Numbers] = []
    strong: set[int] = set()
    for name in names:
        own = chance.permutation(np.flatnonzero(np.array(values, dtype=object) == name))
        if name in options.strong_values:
            strong |= set(range(len(sites), len(sites) + options.sites))
        sites += _cut(own, _sizes(len(own), options.sites, 0))
    if not options.strong_values:
        strong = set(_drawn_strong(options, len(sites), chance))
    return Split(tuple(sites), frozenset(strong))


_KINDS: Mapping[str, Callable[[Partition, Sequence[str], int, np.random.Generator], Split]] = {
    "iid": _iid,
    "strong-classes": _strong_classes,
    "dirichlet": _dirichlet,
    "natural": _natural,
}


def _chosen_values(options: Partition, values: Sequence[str], chance: np.random.Generator) -> list[str]:
    names = sorted(set(values))
    if options.strong_classes is not None:
        if options.strong_classes > len(names):
            raise DataError(f"partition.strong_classes is {options.strong_classes}; {options.by!r} has {names}")
        return sorted(chance.permutation(names)[: options.strong_classes].tolist())
    if unknown := sorted(set(options.strong_values) - set(names)):
        raise DataError(f"partition.strong_values has {unknown[0]!r}; column {options.by!r} has {names}")
    return list(options.strong_values)


def _strong_count(options: Partition, sites: int) -> int:
    """Strong sites; at least one where there are to be any."""
    return max(round(options.strong_share * sites), 1 if options.strong_share else 0)


def _drawn_strong(options: Partition, sites: int, chance: np.random.Generator) -> frozenset[int]:
    return frozenset(chance.permutation(sites)[: _strong_count(options, sites)].tolist())


def _sizes(documents: int, sites: int, growth: float) -> list[int]:
    """Sizes that sum to ``documents``, by largest remainder."""
    if not sites:
        return []
    shares = np.arange(1, sites + 1, dtype=np.float64) ** growth
    exact = documents * shares / shares.sum()
    sizes = np.floor(exact).astype(np.int64)
    largest = np.argsort(sizes - exact, kind="stable")
    sizes[largest[: documents - int(sizes.sum())]] += 1
    return [int(size) for size in sizes]


def _cut(documents: Numbers, sizes: Sequence[int]) -> tuple[Numbers, ...]:
    ends = np.cumsum([0, *sizes])
    return tuple(np.sort(documents[a:b]).astype(np.int64) for a, b in pairwise(ends))
