"""From where on a person should look. Every default and description is here and nowhere else."""

from __future__ import annotations

from pydantic import Field

from common.configuration import Section


class Limits(Section):
    """Limits of a leak check (``[leak_check]`` in ``site.toml``). None is worked out from documents."""

    shared_characters: int = Field(
        default=100,
        ge=16,
        description="Look at a text that shares a run of this many characters with a document. Texts that have nothing "
        "to do with each other rarely share a hundred.",
    )
    whole_characters: int = Field(
        default=50,
        ge=16,
        description="Look at a text of this many characters or more that lies in a document as a whole.",
    )
    common_units: int = Field(
        default=5,
        ge=2,
        description="What is in documents of this many privacy units is taken for boilerplate or common knowledge, and "
        "nothing is made of it. Of runs, held-out documents count as well.",
    )
    rare_identifiers: int = Field(
        default=0,
        ge=0,
        description="Most different identifiers of one kind that the texts may share with documents of fewer units "
        "than that, beyond what chance explains.",
    )
    overlap_excess: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Look if surely more than this share of word sequences is in documents but not in as many held-out "
        "ones.",
    )
    nearer_share: float = Field(
        default=0.55,
        ge=0.5,
        le=1,
        description="Look if surely more than this share of texts is nearer to documents than to as many held-out "
        "ones; without memorisation it is about one half.",
    )
