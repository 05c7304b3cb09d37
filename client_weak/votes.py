"""Votes: which candidates are nearest to a site's own documents (RAFT, phase 2; Private Evolution's histogram).

Each document looks at the candidates of its own code and names the K nearest; bounding them to R votes per privacy unit
is `common.privacy.bounding.vote_counts`. Both texts are cleaned alike before they are compared: candidates come from
elsewhere, and what can't be seen in a text shouldn't win votes.
"""

from __future__ import annotations

from client_weak.neighbours import Vectors, comparable, nearest_candidates
from common.privacy.accounting import DiscreteGaussian
from common.privacy.bounding import vote_counts
from common.privacy.noise import discrete_gaussian
from common.privacy.values import Noised
from common.protocol import CandidatePool
from common.site.documents import Documents
from common.study import Study


def noisy_ballot(
    documents: Documents,
    vectors: Vectors,
    pool: CandidatePool,
    pool_vectors: Vectors,
    study: Study,
    mechanism: DiscreteGaussian,
) -> Noised:
    """Noised votes. With no document under any code it is noise only.

    Parameters
    ----------
    vectors, pool_vectors
        Of the documents' texts, private, and of the candidates', float32 ``(documents, d)`` and ``(candidates, d)``, by
        one embedder.

    Returns
    -------
    Noised
        int64 ``(candidates,)``.
    """
    own, others = comparable(vectors, pool_vectors, study.voting.similarity)
    nearest = nearest_candidates(own, documents.codes, others, pool.codes, neighbours=study.neighbours)
    exact = vote_counts(nearest, documents.units, candidates=len(pool), votes_per_unit=mechanism.cells_per_unit)
    return discrete_gaussian(exact, mechanism.scale)
