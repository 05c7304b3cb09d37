"""What an operator checks before a study starts. For this machine's screen only; nothing travels."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError, MissingExtraError, SiteConfigError
from common.site.config import Site
from common.site.documents import Documents, Progress
from common.study import Study

STRONG_LIBRARIES = ("torch", "transformers", "peft", "opacus")


@dataclass(frozen=True, repr=False, eq=False)
class SiteCheck:
    """Sizes of a site's documents. Private: for the operator.

    Attributes
    ----------
    documents, units
        Documents that the study can use, and the privacy units they belong to.
    undeclared
        Rows left out because the study doesn't declare one of their values.
    problems
        Malformed rows left out: reason in words -> number of rows.
    report
        What was read and left out, in words, with row numbers.
    codes
        Documents under each control code, exact, int64 ``(codes,)``.
    """

    documents: int
    units: int
    undeclared: int
    problems: Mapping[str, int]
    report: str
    codes: NDArray[np.int64]

    def __repr__(self) -> str:
        return f"SiteCheck(<{self.documents} private documents of {self.units} units>)"


def check_site(site: Site, study: Study, *, progress: Progress | None = None) -> SiteCheck:
    """Read the documents as the study would.

    Raises
    ------
    UserError
        One sentence about the first thing that keeps this site from taking part. It may name exact numbers:
        for the operator's eyes only.
    """
    check_libraries(site)
    _check_size_class(site, study)
    documents = Documents.load(site, study, progress=progress)
    reasons = Counter(problem.reason.value for problem in documents.problems)
    _check_units(site, study, documents, reasons)
    codes = np.bincount(documents.codes, minlength=len(study.codes)).astype(np.int64)
    return SiteCheck(
        documents=len(documents) - documents.further_codes,
        units=documents.unit_count,
        undeclared=documents.undeclared,
        problems=dict(reasons),
        report=documents.report(),
        codes=codes,
    )


def check_libraries(site: Site) -> None:
    """Refuse to be a strong site without the libraries that train. Nothing is imported.

    Raises
    ------
    MissingExtraError
    """
    if site.tier != "strong":
        return
    missing = [name for name in STRONG_LIBRARIES if not _is_installed(name)]
    if missing:
        raise MissingExtraError(
            f"site {site.name!r}: tier is 'strong', but {', '.join(missing)} can't be found; "
            'pip install "fedcorpus[strong]", or set tier = "weak"'
        )


def _check_size_class(site: Site, study: Study) -> None:
    minimum = max(study.federation.min_documents, site.policy.min_documents)
    if site.size_class < minimum:
        raise SiteConfigError(
            f"site {site.name!r}: size_class is {site.size_class}; study {study.name!r} accepts at least "
            f"{minimum} (federation.min_documents and policy.min_documents)"
        )


def _check_units(site: Site, study: Study, documents: Documents, reasons: Mapping[str, int]) -> None:
    units, unit = documents.unit_count, study.privacy.unit
    minimum = max(study.federation.min_documents, site.policy.min_documents)
    if not units:
        raise DataError(
            f"{site.documents.path}: study {study.name!r} can use no document: {documents.undeclared} rows "
            f"have values that it doesn't declare, {sum(reasons.values())} are malformed{_mostly(reasons)}"
        )
    if units < minimum:
        raise DataError(
            f"{site.documents.path}: site {site.name!r} holds {units} units (unit is the {unit}); "
            f"study {study.name!r} and the policy need at least {minimum} (federation.min_documents, "
            "policy.min_documents)"
        )
    if site.size_class > units:
        raise SiteConfigError(
            f"site {site.name!r}: size_class is {site.size_class}, but the site holds {units} units "
            f"(unit is the {unit}); a lower bound of {minimum} to {units} is accepted"
        )


def _mostly(reasons: Mapping[str, int]) -> str:
    return f" (mostly: {max(reasons, key=lambda reason: reasons[reason])})" if reasons else ""


def _is_installed(name: str) -> bool:
    # find_spec raises for a module that was put into sys.modules without a spec.
    return name in sys.modules or importlib.util.find_spec(name) is not None
