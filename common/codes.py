"""Control codes: the public grid of attribute values that every document and every synthetic text sits in.

A study declares attributes with their public values; a control code is one combination of them, and codes are
numbered in declaration order (the last attribute moves fastest). The grid is public, so a code's index, label and
prompt are too. Which codes a document has is private: one, or several where an attribute is `multiple`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice, product
from math import prod

from pydantic import Field, field_validator, model_validator

from common.configuration import Section

MAX_CODES = 100_000


class Attribute(Section):
    """One public attribute of a document and the values it may take."""

    name: str = Field(description="Name of the attribute, as it appears in prompts and in the corpus.", min_length=1)
    values: tuple[str, ...] = Field(
        description="Every value the attribute may take. Public; fixed before data is seen."
    )
    multiple: bool = Field(
        default=False,
        description="Whether a document may have several of the values, as a list in its cell. It then counts under "
        "each of them, in the order of the list, up to privacy.codes_per_unit codes.",
    )

    @cached_property
    def declared(self) -> frozenset[str]:
        """The values, to look one up in."""
        return frozenset(self.values)

    @field_validator("values", mode="before")
    @classmethod
    def _numbers_are_values_too(cls, values: object) -> object:
        if not isinstance(values, list | tuple):
            return values
        return tuple(str(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in values)

    @field_validator("values")
    @classmethod
    def _values_are_distinct(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if not values:
            raise ValueError("has no values; at least one public value is needed")
        if any(not v.strip() for v in values):
            raise ValueError("has an empty value; every value must be a visible text")
        padded = [v for v in values if v != v.strip()]
        if padded:
            # Cells are stripped before they are looked up, so no document could ever have such a value.
            raise ValueError(f"lists {padded[0]!r}, with blanks around it; write it without")
        repeated = sorted(v for v, times in Counter(values).items() if times > 1)
        if repeated:
            raise ValueError(f"lists {repeated[0]!r} more than once; values must be distinct")
        return values


class ControlCodes(Section):
    """The schema of the codes and the wording of the prompt that conditions the generator on one."""

    attributes: tuple[Attribute, ...] = Field(description="The attributes whose combinations are the control codes.")
    preamble: str = Field(
        default="",
        description="Public text put before the attributes in every prompt; says what kind of document is wanted.",
    )

    @model_validator(mode="after")
    def _attributes_make_a_grid(self) -> ControlCodes:
        if not self.attributes:
            raise ValueError("no attributes are declared; a study needs at least one attribute with public values")
        names = [a.name for a in self.attributes]
        if len(set(names)) != len(names):
            raise ValueError(f"attribute names {names} are not distinct")
        if prod(len(a.values) for a in self.attributes) > MAX_CODES:
            raise ValueError(f"the attributes make more than {MAX_CODES} codes; declare fewer values")
        return self

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Attribute names, in order."""
        return tuple(a.name for a in self.attributes)

    @cached_property
    def combinations(self) -> tuple[tuple[str, ...], ...]:
        """Values of every code; position is the code's index."""
        return tuple(product(*(a.values for a in self.attributes)))

    @cached_property
    def _index_of(self) -> dict[tuple[str, ...], int]:
        return {values: index for index, values in enumerate(self.combinations)}

    def __len__(self) -> int:
        return len(self.combinations)

    def index(self, values: tuple[str, ...]) -> int | None:
        """Index of a combination of values, or None if the study doesn't declare it."""
        return self._index_of.get(values)

    @cached_property
    def multiple(self) -> bool:
        """Whether a document may have several codes."""
        return any(a.multiple for a in self.attributes)

    def indices(self, values: Sequence[Sequence[str]], most: int) -> list[int]:
        """Indices of the declared combinations of several values an attribute; the first ``most``, in the order given.

        Values that the study doesn't declare are left out, so a list of a billion combinations is no work.
        """
        declared = [
            [value for value in dict.fromkeys(given) if value in attribute.declared]
            for attribute, given in zip(self.attributes, values, strict=True)
        ]
        return [self._index_of[combination] for combination in islice(product(*declared), most)]

    def label(self, index: int) -> str:
        """A code in words for people, e.g. ``topic=Staff, tone=critical``."""
        return ", ".join(f"{n}={v}" for n, v in zip(self.names, self.combinations[index], strict=True))

    def as_mapping(self, index: int) -> Mapping[str, str]:
        """A code as attribute -> value."""
        return dict(zip(self.names, self.combinations[index], strict=True))

    def prompt(self, index: int) -> str:
        """Text that conditions the generator on a code: ``-log p(text | code)`` reads it as the condition."""
        lines = [self.preamble] if self.preamble else []
        lines += [f"{n}: {v}" for n, v in zip(self.names, self.combinations[index], strict=True)]
        return "\n".join(lines) + "\nText:"
