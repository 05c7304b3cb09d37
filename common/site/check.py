"""What an operator checks before a study starts. Results are for this machine's screen only; nothing travels."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import DataError, MissingExtraError, SiteConfigError
from common.site.config import Site
from common.site.documents import Documents
from common.study import Study

STRONG_LIBRARIES = ("torch", "transformers", "peft", "opacus")


@dataclass(frozen=True, repr=False)
class SiteCheck:
    """Sizes of a site's documents. Private: for the operator."""

    documents: int
    units: int
    undeclared: int
    problems: Mapping[str, int]


def check_site(site: Site, study: Study) -> SiteCheck:
    """Read the documents as the study would.

    Raises
    ------
    UserError
        One sentence about the first thing that keeps this site from taking part.
    """
    check_libraries(site)
    documents = Documents.load(site, study)
    if not len(documents):
        raise DataError(
            f"{site.documents.path}: no document can be used by study {study.name!r}: {documents.undeclared} rows have "
            f"undeclared values, {len(documents.problems)} are malformed"
        )
    units, minimum = documents.unit_count, study.federation.min_documents
    if units < minimum:
        raise DataError(
            f"site {site.name!r} holds {units} units ({study.privacy.unit}s); study {study.name!r} needs at least {minimum}"
        )
    if site.size_class > units:
        raise SiteConfigError(
            f"site {site.name!r} declares size_class {site.size_class} but holds {units} units; at most {units} is true"
        )
    reasons = Counter(problem.reason.value for problem in documents.problems)
    return SiteCheck(len(documents), units, documents.undeclared, dict(reasons))


def check_libraries(site: Site) -> None:
    """Refuse to be a strong site without the libraries that train.

    Raises
    ------
    MissingExtraError
    """
    missing = [name for name in STRONG_LIBRARIES if importlib.util.find_spec(name) is None]
    if site.tier == "strong" and missing:
        raise MissingExtraError(
            f"site {site.name!r} is strong, but {', '.join(missing)} isn't installed; pip install 'fedcorpus[strong]', or "
            "set tier = \"weak\""
        )
