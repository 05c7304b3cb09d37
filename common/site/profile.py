"""The profile: how many privacy units a site holds under each control code, released with noise by either tier."""

from __future__ import annotations

from common.privacy.accounting import DiscreteGaussian
from common.privacy.bounding import profile_counts
from common.privacy.noise import discrete_gaussian
from common.privacy.values import Noised
from common.site.documents import Documents
from common.study import Study


def noisy_profile(documents: Documents, study: Study, mechanism: DiscreteGaussian) -> Noised:
    """Noised profile, int64 of shape ``(codes,)`` (RAFT, phase 2; released by strong sites too)."""
    exact = profile_counts(
        documents.codes,
        documents.units,
        number_of_codes=len(study.codes),
        codes_per_unit=mechanism.cells_per_unit,
    )
    return discrete_gaussian(exact, mechanism.scale)
