"""The leak check: a site compares a corpus with its own documents before the corpus is published.

It is empirical. It may find what leaked, and can't show that nothing did: the guarantee is epsilon's. What it finds
depends on private documents and carries no noise, so it stays with whoever runs it (`CAUTION`).

What a corpus has in common with documents means little by itself: texts of one kind have much in common. So everything
is also measured on bystanders, documents that can't have leaked (`common.site.audit.groups`).

    found = check_leaks(read_corpus([path]), read_documents(site, study), None)
    found.findings      # what a person should look at, in sentences without any text
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from common.models.embedder import load_embedder
from common.site.audit.copies import runs_found
from common.site.audit.findings import findings
from common.site.audit.found import LeakCheck
from common.site.audit.groups import Groups
from common.site.audit.identified import identifiers_found
from common.site.audit.limits import Limits
from common.site.audit.neighbours import neighbours_found
from common.site.audit.ngrams import sequences_found
from common.site.audit.sources import OwnDocuments, Texts
from common.site.audit.stages import Progress
from common.study import Voting

CAUTION = (
    "This is an empirical check. It doesn't replace the differential-privacy guarantee, and finding nothing proves "
    "nothing. Its result depends on your private documents and carries no noise: don't publish it, don't send it to "
    "the coordinator. Dropping or choosing texts of the corpus because of it is itself a release that no epsilon "
    "counts."
)


def check_leaks(
    corpus: Texts,
    documents: OwnDocuments,
    holdout: Sequence[str] | None,
    limits: Limits = Limits(),  # frozen
    voting: Voting = Voting(),  # frozen
    models: Mapping[str, Path] | None = None,
    progress: Progress = lambda stage, share: None,
) -> LeakCheck:
    """Compare a corpus with a site's documents, and with held-out ones if there are any.

    Parameters
    ----------
    corpus
        Synthetic texts.
    documents
        The site's own. Private.
    holdout
        Documents as they look, of the same kind, that had no part in the study. Private.
    voting
        Names the embedder by which texts are near.
    models
        Where models lie on this machine: name -> folder.

    Returns
    -------
    LeakCheck
        Private: it carries no noise.

    Raises
    ------
    DataError
        If no held-out document remains beside those that are documents too.
    ModelError, MissingExtraError
        If the embedder can't be loaded.
    """
    embedder = load_embedder(voting, models)
    groups = Groups.of(documents, holdout)
    check = LeakCheck(
        texts=len(corpus.texts),
        unreadable=corpus.unreadable,
        documents=len(documents.texts),
        units=len(np.unique(documents.units)),
        held_out=None if groups.held_out is None else len(groups.held_out),
        overlap=groups.overlap,
        bystanders=len(groups.bystanders),
        runs=runs_found(corpus, documents, groups, limits, progress),
        sequences=sequences_found(corpus, documents, groups, progress),
        neighbours=neighbours_found(corpus, documents, groups, embedder, voting.embedder, progress),
        identifiers=identifiers_found(corpus, documents, groups, limits, progress),
        limits=limits,
        findings=(),
        caution=CAUTION,
    )
    return check.model_copy(update={"findings": findings(check)})
