"""Personal identifiers of a corpus that documents have too, and how many of these chance explains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from common.site.audit.found import IdentifiersFound
from common.site.audit.groups import Groups
from common.site.audit.identifiers import KINDS, Identifier, identifiers, keys_of
from common.site.audit.known_values import KnownValues, Value
from common.site.audit.limits import Limits
from common.site.audit.sources import OwnDocuments, Texts
from common.site.audit.stages import Progress, counted

Holders = Mapping[str, int]
"""Key of an identifier -> privacy units with a document that has it, as many as make it common at most. Private."""


def identifiers_found(
    corpus: Texts, documents: OwnDocuments, groups: Groups, limits: Limits, progress: Progress
) -> tuple[IdentifiersFound, ...]:
    """Identifiers of a corpus by kind: by pattern, and what the site's identifier columns name."""
    values = {value for of_document in documents.values for value in of_document}
    known = KnownValues(values)
    texts = _Identified(corpus.texts, corpus.rows, known, "identifiers of texts", progress)
    bystanders = _Identified(
        groups.bystanders, range(len(groups.bystanders)), known, "identifiers that documents share anyway", progress
    )
    wanted = texts.keys | bystanders.keys
    keys = [
        (keys_of(text) | {_key(value) for value in of_document}) & wanted
        for text, of_document in zip(
            counted(documents.texts, "identifiers of documents", progress), documents.values, strict=True
        )
    ]
    units = documents.units.tolist()
    held = _holders(((keys[i], units[i]) for i in range(len(keys))), limits.common_units)
    beside = _holders(((keys[i], units[i]) for i in groups.beside), limits.common_units)
    kinds = {kind.name: kind.identifying for kind in KINDS}
    kinds |= {_kind(value): not value.is_one_name for value in sorted(values, key=lambda value: value.column)}
    return tuple(
        _of_kind(kind, identifying, texts, bystanders, held, beside, limits.common_units)
        for kind, identifying in kinds.items()
    )


class _Identified:
    """Identifiers of texts by kind and key: the first of each, and rows that have it. Private."""

    def __init__(
        self, texts: Sequence[str], rows: Sequence[int], known: KnownValues, stage: str, progress: Progress
    ) -> None:
        self._first: dict[tuple[str, str], Identifier] = {}
        self._rows: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        for row, text in zip(rows, counted(texts, stage, progress), strict=True):
            for found in _all_of(text, known):
                self._first.setdefault((found.kind, found.key), found)
                self._rows[found.kind, found.key].add(row)

    @property
    def keys(self) -> set[str]:
        return {key for _, key in self._first}

    def of(self, kind: str) -> list[Identifier]:
        return [found for found in self._first.values() if found.kind == kind]

    def rows(self, some: Iterable[Identifier]) -> tuple[int, ...]:
        return tuple(sorted({row for found in some for row in self._rows[found.kind, found.key]}))


def _all_of(text: str, known: KnownValues) -> Iterator[Identifier]:
    yield from identifiers(text)
    for value, written in known.found(text):
        yield Identifier(_kind(value), written, _key(value))


def _kind(value: Value) -> str:
    return f"column {value.column!r}{', single words' if value.is_one_name else ''}"


def _key(value: Value) -> str:
    return f"{value.column}: {' '.join(value.words)}"


def _holders(documents: Iterable[tuple[set[str], int]], most: int) -> Holders:
    units: defaultdict[str, set[int]] = defaultdict(set)
    for keys, unit in documents:
        for key in keys:
            if len(units[key]) < most:
                units[key].add(unit)
    return {key: len(found) for key, found in units.items()}


def _of_kind(
    kind: str,
    identifying: bool,
    texts: _Identified,
    bystanders: _Identified,
    held: Holders,
    beside: Holders,
    common_units: int,
) -> IdentifiersFound:
    own, others = texts.of(kind), bystanders.of(kind)
    rare = [found for found in own if 0 < held.get(found.key, 0) < common_units]
    by_chance = sum(0 < beside.get(found.key, 0) < common_units for found in others)
    return IdentifiersFound(
        kind=kind,
        identifying=identifying,
        distinct=len(own),
        rows=texts.rows(own),
        in_documents=sum(found.key in held for found in own),
        rare=len(rare),
        rare_rows=texts.rows(rare),
        by_chance=len(own) * by_chance / len(others) if others else 0.0,
        bystanders=len(others),
        written=tuple(found.written for found in rare),
    )
