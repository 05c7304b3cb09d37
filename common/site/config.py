"""``site.toml``: what a hospital tells its own software. It stays at the site.

The file says which documents there are, which tier the hospital chose, and what it allows (`Policy`). There are no
defaults for the policy's limits: a site without a policy doesn't start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.configuration import NAME, load_model
from common.errors import SiteConfigError


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DocumentsFile(_Section):
    """Where the documents are and what their columns are called."""

    path: Path = Field(description="Parquet, CSV or JSONL file; CSV and JSONL may be gzipped (.gz).")
    text_column: str = Field(default="text", description="Column with the text.")
    code_columns: dict[str, str] = Field(
        default_factory=dict, description="Attribute name -> column name, where they differ."
    )
    patient_column: str | None = Field(
        default=None,
        description="Column that names the patient; needed for studies whose unit is the patient.",
    )
    on_malformed: Literal["skip", "stop"] = Field(
        default="skip",
        description="What a malformed row does: 'skip' leaves the row out and reports it, 'stop' ends.",
    )

    def column_of(self, attribute: str) -> str:
        """Column that holds an attribute."""
        return self.code_columns.get(attribute, attribute)


class Policy(_Section):
    """The hospital's own limits. Nothing the coordinator sends can widen them."""

    max_epsilon: float = Field(gt=0, description="Cap on epsilon over all studies on these documents, for life.")
    max_delta: float = Field(gt=0, lt=1, description="Cap on delta over all studies on these documents, for life.")
    max_epsilon_per_study: float | None = Field(
        default=None, gt=0, description="Cap on one study's epsilon; unset means only the lifetime cap holds."
    )
    allowed_units: tuple[Literal["record", "patient"], ...] = Field(
        default=("record", "patient"), description="Privacy units this hospital accepts."
    )
    allowed_studies: tuple[str, ...] | Literal["any"] = Field(
        default="any",
        description="SHA-256 of the studies this hospital has agreed to, or 'any' within the caps.",
    )


class Site(_Section):
    """A hospital (``site.toml``)."""

    name: str = Field(pattern=NAME, description="Public name of the site.")
    tier: Literal["strong", "weak"] = Field(description="'strong' trains, 'weak' profiles and votes. Your choice.")
    size_class: int = Field(
        ge=1,
        description="A public lower bound on your number of privacy units, e.g. 1000. Sample rate and noise come from "
        "it, never from the exact number.",
    )
    state: Path = Field(description="Folder for the ledger. Must outlive restarts.")
    documents: DocumentsFile = Field(description="Your documents.")
    policy: Policy = Field(description="Your limits.")
    models: dict[str, Path] = Field(
        default_factory=dict,
        description="Where models of a study lie on this machine: name in the study -> local folder.",
    )

    @model_validator(mode="after")
    def _paths_are_absolute(self) -> Site:
        for name, path in (("documents.path", self.documents.path), ("state", self.state)):
            if not path.is_absolute():
                raise ValueError(f"{name} is {str(path)!r}; an absolute path is needed")
        return self

    @property
    def ledger_path(self) -> Path:
        """File of the ledger."""
        return self.state / "ledger.sqlite"

    @classmethod
    def load(cls, path: Path) -> Site:
        """Read ``site.toml``.

        Raises
        ------
        SiteConfigError
            With one sentence that names the file, the field, the value and what would be accepted.
        """
        return load_model(cls, path, SiteConfigError)
