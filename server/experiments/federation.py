"""Sites of an experiment on this machine, and the studies that one phase alone asks of them.

A phase's study holds the parts that its result depends on; the others have values that are the same in all studies, so
cells that differ in them share what the phase makes. Each phase asks only the sites of its tier.

The door, the ledger and the noise are the real ones. A site allows a study the epsilon that it states and no more. Over
studies it has no cap worth the name: every cell of an experiment is another world in which it is the only one, and the
text is public.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from common.configuration import first_problem
from common.errors import FederationError, UserError
from common.logs import NAME
from common.privacy.accounting import joint_epsilon
from common.site.plan import site_plan
from common.study import Privacy, Study
from server.census import Roster
from server.experiments.data import PATIENT
from server.workspace import write_atomically

Tier = Literal["strong", "weak"]

_LIFE_EPSILON, _LIFE_DELTA = 1e9, 0.999
_NEUTRAL: Mapping[str, Mapping[str, Any]] = {
    "generator": {"base": "package:none"},
    "training": {"batch_size": 1},
    "pool": {"max_new_tokens": 1},
}
"""What a phase's study has for parts that the phase doesn't depend on."""


@dataclass(frozen=True)
class SiteDocuments:
    """One site's documents.

    Attributes
    ----------
    name
        Of the site.
    content
        Its file: JSON lines.
    units
        Privacy units in it.
    """

    name: str
    content: bytes
    units: int

    @property
    def size_class(self) -> int:
        """A public lower bound on the units: two digits of their number."""
        step = int(10 ** max(len(str(self.units)) - 2, 0))
        return self.units // step * step

    @property
    def sha256(self) -> str:
        """Hash of name and documents."""
        return hashlib.sha256(self.name.encode() + b"\n" + self.content).hexdigest()

    @classmethod
    def of(cls, name: str, content: bytes, unit: str) -> SiteDocuments:
        """Count the units in a file's content."""
        rows = content.splitlines()
        patients = {json.loads(row).get(PATIENT) for row in rows} if unit == "patient" else rows
        return cls(name, content, len(patients))


def phase_study(
    template: Study, keep: Collection[str], tier: Tier, sites: Sequence[SiteDocuments], **changes: Mapping[str, Any]
) -> Study:
    """The study of one phase.

    Parameters
    ----------
    keep
        Sections of the template that the phase depends on; codes always are.
    changes
        Section -> options that differ from the template's.

    Raises
    ------
    UserError
        If parts don't fit together, such as a batch larger than the smallest site.
    """
    smallest = min((site.size_class for site in sites), default=1)
    if sites and "training" in keep and template.training.batch_size > smallest:
        raise UserError(
            f"experiment: training.batch_size is {template.training.batch_size}, and the smallest site that trains has "
            f"size class {smallest}; take a smaller batch, or fewer sites"
        )
    dumped = template.model_dump(mode="json")
    codes = len(template.codes)
    parts: dict[str, Any] = {name: dict(options) for name, options in _NEUTRAL.items()}
    parts["pool"]["size"] = max(1000, codes)
    parts |= {name: dumped[name] for name in ("codes", *keep)}
    for section, options in changes.items():
        parts[section] = {**parts.get(section, {}), **options}
    parts["federation"] = {
        "expected_sites": max(len(sites), 1),
        "min_strong": max(len(sites), 1) if tier == "strong" else 1,
        "min_weak": max(len(sites) - 1, 0) if tier == "weak" else 0,
        "min_documents": smallest,
        "max_units": template.federation.max_units,
        "census_seconds": 5.0,
    }
    try:
        return Study.model_validate({"name": template.name, **parts})
    except ValidationError as error:
        raise UserError(f"experiment: the study of the {tier} sites: {first_problem(error)}") from error


def matching_paper(study: Study, tier: Tier, sites: Sequence[SiteDocuments]) -> Privacy:
    """Joint accounting at what the paper's way, promising the study's epsilon, really composes to.

    For the smallest size class; larger sites' differs a little.
    """
    paper = study.privacy.model_copy(update={"accounting": "paper"})
    smallest = min(site.size_class for site in sites)
    plan = site_plan(study.model_copy(update={"privacy": paper}), tier, smallest)
    composed = joint_epsilon(plan.mechanisms, plan.delta)
    return study.privacy.model_copy(update={"accounting": "joint", "epsilon": composed})


def write_sites(homes: Path, folder: Path, tier: Tier, sites: Sequence[SiteDocuments], study: Study) -> dict[int, Path]:
    """Write documents and site files; number of each site, from 1 -> its site file.

    Parameters
    ----------
    homes
        Where documents, ledgers and kept embeddings are, over all cells.
    folder
        Where the site files go.
    """
    files: dict[int, Path] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for number, site in enumerate(sites, start=1):
        home = homes.resolve() / f"{tier}-{site.sha256[:24]}"
        home.mkdir(parents=True, exist_ok=True)
        documents = home / "documents.jsonl"
        if not documents.exists():
            write_atomically(documents, site.content)
        files[number] = folder / f"{site.name}.toml"
        write_atomically(files[number], _site_file(site, tier, home, documents, study).encode())
    return files


def require_answers(roster: Roster, sites: Sequence[SiteDocuments]) -> None:
    """An experiment in which a site kept silent shows something else than it says.

    Raises
    ------
    FederationError
        Naming the sites that didn't answer, and why.
    """
    missing = [f"{site.name}: {site.outcome}" for site in roster.all if not site.answers]
    if missing or len(roster.all) < len(sites):
        raise FederationError(
            f"experiment: {len(roster.all) - len(missing)} of {len(sites)} sites answered; {'; '.join(missing)}"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Libraries and sites say much that is the same a hundred times; what goes wrong is still said.

    Loggers belong to the whole process, so they are left as they were found: a level that stayed would silence the
    site's log in whatever runs next.
    """
    ours = logging.getLogger(NAME)
    loggers = (ours, *(logging.getLogger(name) for name in ("flwr", "sentence_transformers")))
    levels = [logger.level for logger in loggers]
    # With a handler of its own, the app leaves the logger as it is.
    handler = None if ours.handlers else logging.StreamHandler()
    if handler is not None:
        ours.addHandler(handler)
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if handler is not None:
            ours.removeHandler(handler)


def _site_file(site: SiteDocuments, tier: Tier, home: Path, documents: Path, study: Study) -> str:
    privacy = study.privacy
    policy: dict[str, Any] = {"max_epsilon": _LIFE_EPSILON, "max_delta": _LIFE_DELTA}
    if privacy.epsilon is not None:
        policy["max_epsilon_per_study"] = privacy.epsilon
    if privacy.delta is not None:
        policy["max_delta_per_study"] = privacy.delta
    tables: Mapping[str, Mapping[str, Any]] = {
        "": {"name": site.name, "tier": tier, "size_class": site.size_class, "state": str(home / "state")},
        "documents": {"path": str(documents)} | ({"patient_column": PATIENT} if privacy.unit == "patient" else {}),
        "policy": policy,
    }
    return "".join(
        (f"[{name}]\n" if name else "") + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
        for name, values in tables.items()
    )
