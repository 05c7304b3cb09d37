"""``site.toml``: what a hospital tells its own software. It stays at the site.

The file says which documents there are, which tier the hospital chose, and what it allows (`Policy`). There are no
defaults for the policy's limits: a site without a policy doesn't start.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from common.configuration import NAME, Section, load_model
from common.errors import SiteConfigError
from common.site.audit.limits import Limits

_KEY = re.compile(r"[0-9a-fA-F]{64}")


class DocumentsFile(Section):
    """Where the documents are and what their columns are called."""

    path: Path = Field(description="Parquet, CSV or JSONL file; CSV and JSONL may be gzipped (.gz).")
    text_column: str = Field(default="text", description="Column with the text.")
    code_columns: dict[str, str] = Field(
        default_factory=dict, description="Attribute name -> column name, where they differ."
    )
    value_separator: str | None = Field(
        default=None,
        min_length=1,
        max_length=8,
        description="What separates the values of one cell where an attribute may have several, e.g. '|'. JSON lines "
        "and Parquet may have lists instead.",
    )
    patient_column: str | None = Field(
        default=None,
        description="Column that names the patient; needed for studies whose unit is the patient.",
    )
    identifier_columns: tuple[str, ...] = Field(
        default=(),
        description="Columns with names or numbers of persons. 'fedcorpus site audit' looks for them in a corpus; "
        "nothing else reads them.",
    )
    assets: tuple[str, ...] = Field(
        default=(),
        description="Names of the data assets that the documents come from, e.g. ['oncology-letters']. Sites of one "
        "hospital that share a state folder share a budget where their assets overlap; none named means all data.",
    )
    on_malformed: Literal["skip", "stop"] = Field(
        default="skip",
        description="What a malformed row does: 'skip' leaves the row out and reports it, 'stop' ends.",
    )

    def column_of(self, attribute: str) -> str:
        """Column that holds an attribute."""
        return self.code_columns.get(attribute, attribute)


class Policy(Section):
    """The hospital's own limits. Nothing the coordinator sends can widen them."""

    max_epsilon: float = Field(gt=0, description="Cap on epsilon over all studies on these documents, for life.")
    max_delta: float = Field(gt=0, lt=1, description="Cap on delta over all studies on these documents, for life.")
    composition: Literal["basic", "renyi"] = Field(
        default="basic",
        description="How studies count against the caps. basic: epsilons and deltas are added up. renyi: a Renyi "
        "filter, which admits more where there are many small studies, and less where there are one or two.",
    )
    max_epsilon_per_study: float | None = Field(
        default=None, gt=0, description="Cap on one study's epsilon; unset means only the lifetime cap holds."
    )
    max_delta_per_study: float | None = Field(
        default=None, gt=0, lt=1, description="Cap on one study's delta; unset means only the lifetime cap holds."
    )
    allowed_units: tuple[Literal["record", "patient"], ...] = Field(
        default=("record", "patient"), description="Privacy units this hospital accepts."
    )
    allowed_requests: tuple[Literal["train", "profile-and-vote"], ...] = Field(
        default=("train", "profile-and-vote"), description="Requests this hospital answers."
    )
    allowed_studies: tuple[str, ...] | Literal["any", "ask"] = Field(
        default="any",
        description="SHA-256 of the studies this hospital has agreed to; 'any' within the caps; or 'ask': every study "
        "waits until a person has said 'fedcorpus site approve'.",
    )
    min_documents: int = Field(
        default=1,
        ge=1,
        description="Fewest privacy units with which this hospital takes part; held against its size class, and by "
        "'site check' against the documents.",
    )
    min_candidates_per_code: int = Field(
        default=1, ge=1, description="Fewest candidates that a code of a pool may have, if it has any."
    )
    max_candidates: int = Field(default=100_000, ge=1, description="Most candidates of a pool.")
    max_candidate_characters: int = Field(default=100_000, ge=1, description="Most characters of one candidate.")
    max_request_bytes: int = Field(
        default=1_000_000_000, ge=1, description="Most bytes of texts or adapter weights in one request."
    )


class Machine(Section):
    """How a strong site's machine trains: what fits into it. No result depends on it but for rounding."""

    gradients: Literal["fused", "opacus"] = Field(
        default="fused",
        description="How gradients of single documents are computed. fused: with the forward and backward pass of the "
        "adapted layers. opacus: by Opacus' hooks, slower and larger; the reference.",
    )
    checkpointing: bool = Field(
        default=False,
        description="Whether to compute activations twice instead of keeping them: a third more time, a fraction of "
        "the memory. For 'fused' gradients.",
    )
    physical_documents: int = Field(
        default=16, ge=1, description="Most documents that pass through the model at once; each holds its gradient."
    )
    physical_tokens: int = Field(
        default=2048,
        ge=1,
        description="Most tokens, with padding, that pass through the model at once; a longer document goes alone.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; 'auto' is a GPU if there is one."
    )

    @model_validator(mode="after")
    def _checkpointing_is_fused(self) -> Machine:
        if self.checkpointing and self.gradients != "fused":
            raise ValueError(f"checkpointing is on and gradients is {self.gradients!r}; it needs 'fused'")
        return self


class Site(Section):
    """A hospital (``site.toml``)."""

    name: str = Field(pattern=NAME, description="Public name of the site.")
    tier: Literal["strong", "weak"] = Field(description="'strong' trains, 'weak' profiles and votes. Your choice.")
    size_class: int = Field(
        ge=1,
        description="A public lower bound on your number of privacy units, e.g. 1000. Sample rate and noise come from "
        "it, never from the exact number.",
    )
    state: Path = Field(
        description="Folder for the ledger. Must outlive restarts. On a local disk: network shares don't lock."
    )
    documents: DocumentsFile = Field(description="Your documents.")
    policy: Policy = Field(description="Your limits.")
    ledger_key_file: Path | None = Field(
        default=None,
        description="File with 64 hexadecimal digits that only its owner can read: the ledger is encrypted with this "
        "key. Unset means in the clear. Without the key the ledger is lost.",
    )
    cache_embeddings: bool = Field(
        default=True,
        description="Whether a weak site keeps its documents' vectors in the state folder, so that a request that was "
        "killed, or another study, doesn't embed them again. They are private; with a ledger_key_file they are "
        "encrypted. 'false' also removes those that were kept.",
    )
    models: dict[str, Path] = Field(
        default_factory=dict,
        description="Where models of a study lie on this machine: name in the study -> local folder.",
    )
    machine: Machine = Field(default=Machine(), description="How a strong site's machine trains.")
    leak_check: Limits = Field(default=Limits(), description="When 'fedcorpus site audit' says to look.")

    @model_validator(mode="after")
    def _paths_are_absolute(self) -> Site:
        named = {"documents.path": self.documents.path, "state": self.state, "ledger_key_file": self.ledger_key_file}
        for name, path in named.items():
            if path is not None and not path.is_absolute():
                raise ValueError(f"{name} is {str(path)!r}; an absolute path is needed")
        return self

    @property
    def ledger_path(self) -> Path:
        """File of the ledger."""
        return self.state / "ledger.sqlite"

    def ledger_key(self) -> bytes | None:
        """Key of the ledger, 32 bytes, or None if the site sets none.

        Raises
        ------
        SiteConfigError
            If the file can't be read, others can read it, or it holds no key. It never quotes the content.
        """
        path = self.ledger_key_file
        if path is None:
            return None
        try:
            text, mode = path.read_text(encoding="ascii").strip(), path.stat().st_mode
        except (OSError, UnicodeDecodeError) as cause:
            raise SiteConfigError(f"ledger_key_file {path}: can't be read; 64 hexadecimal digits are needed") from cause
        if mode & 0o077:
            raise SiteConfigError(f"ledger_key_file {path}: others can read it (mode {mode & 0o777:o}); use 600")
        if not _KEY.fullmatch(text):
            raise SiteConfigError(
                f"ledger_key_file {path}: holds {len(text)} characters; 64 hexadecimal digits are needed"
            )
        return bytes.fromhex(text)

    @classmethod
    def load(cls, path: Path) -> Site:
        """Read ``site.toml``.

        Raises
        ------
        SiteConfigError
            With one sentence that names the file, the field, the value and what would be accepted.
        """
        return load_model(cls, path, SiteConfigError)
