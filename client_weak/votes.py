"""Votes: which candidates are nearest to a site's own documents (RAFT, phase 2; Private Evolution's histogram).

Each document looks at the candidates of its own code and names the K nearest in cosine similarity; bounding them to R
votes per privacy unit is `common.privacy.bounding.vote_counts`. Products are computed in blocks, so memory does not
grow with documents x candidates.

What a document names may depend on that document and the public pool alone. Floating-point products don't keep that: a
matrix product rounds a row differently with the number of rows beside it, and in a near-tie one document more would
change what others vote for. So vectors are put on a lattice on which every product is exact (`_exact`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.models.embedder import Embedder, Embeddings
from common.privacy.accounting import DiscreteGaussian
from common.privacy.bounding import vote_counts
from common.privacy.noise import discrete_gaussian
from common.privacy.values import Noised
from common.protocol import CandidatePool
from common.site.documents import Documents
from common.study import Study

BLOCK = 2_000_000
"""Similarities held at once (16 MB)."""

NO_CANDIDATE = -1

LATTICE_BITS = 20
"""Coordinates are multiples of 2^-20. A product of two unit vectors then is a sum of integers that never exceeds 2^41,
and float64 holds integers to 2^53: exact in any order of summation."""


def noisy_ballot(
    documents: Documents, pool: CandidatePool, embedder: Embedder, study: Study, mechanism: DiscreteGaussian
) -> Noised:
    """Noised votes, int64 of shape ``(candidates,)``. With no document under any code it is noise only."""
    nearest = nearest_candidates(
        embedder.embed(documents.texts) if len(documents) else np.zeros((0, 1), np.float32),
        documents.codes,
        embedder.embed(pool.texts) if len(pool) else np.zeros((0, 1), np.float32),
        pool.codes,
        neighbours=study.neighbours,
    )
    exact = vote_counts(nearest, documents.units, candidates=len(pool), votes_per_unit=mechanism.cells_per_unit)
    return discrete_gaussian(exact, mechanism.scale)


def nearest_candidates(
    documents: Embeddings,
    document_codes: NDArray[np.integer],
    candidates: Embeddings,
    candidate_codes: NDArray[np.integer],
    *,
    neighbours: int,
) -> NDArray[np.int64]:
    """The K nearest candidates of each document's own code.

    Parameters
    ----------
    documents, candidates
        Unit vectors, float32 ``(n, d)`` and ``(m, d)``. Documents are private.
    document_codes, candidate_codes
        Code indices, ``(n,)`` and ``(m,)``.
    neighbours
        K.

    Returns
    -------
    ndarray
        int64 ``(n, K)``, nearest first, private; ties go to the lower index, and a code with fewer than K candidates
        leaves `NO_CANDIDATE`.
    """
    own, others = _exact(documents), _exact(candidates)
    nearest = np.full((len(document_codes), neighbours), NO_CANDIDATE, dtype=np.int64)
    for code in np.intersect1d(document_codes, candidate_codes):
        rows = np.flatnonzero(document_codes == code)
        columns = np.flatnonzero(candidate_codes == code)
        kept = min(neighbours, columns.size)
        step = max(1, BLOCK // columns.size)
        for start in range(0, rows.size, step):
            block = rows[start : start + step]
            ranked = _top(own[block] @ others[columns].T, kept)
            nearest[block, :kept] = columns[ranked]
    return nearest


def _exact(vectors: Embeddings) -> NDArray[np.float64]:
    """Unit vectors in units of the lattice: whole numbers of at most 2^20."""
    return np.rint(vectors.astype(np.float64) * 2.0**LATTICE_BITS)


def _top(similarities: NDArray[np.float64], kept: int) -> NDArray[np.int64]:
    """Column indices of the ``kept`` largest values of each row, largest first."""
    if kept < similarities.shape[1]:
        chosen = np.sort(np.argpartition(-similarities, kept - 1, axis=1)[:, :kept], axis=1)
    else:
        chosen = np.broadcast_to(np.arange(kept), similarities.shape)
    values = np.take_along_axis(similarities, chosen, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(chosen, order, axis=1)
