"""What the coordinator remembers of a site between attempts of a run."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

NOT_ASKED = "not asked"
"""Outcome of a site that nothing which depends on data was asked of."""


class KnownSite(BaseModel):
    """A site that an attempt of the run has heard of: public facts, and how it has fared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Name of the site.")
    tier: str = Field(description="strong or weak.")
    size_class: int = Field(description="Declared public lower bound on its units.")
    answers: int = Field(description="Valid answers it gave.")
    outcome: str = Field(description="How its last request ended.")
