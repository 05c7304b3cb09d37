"""What is measured of leaks: the corpus against documents it was made from, and against as many held-out ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from server.evaluation import distances
from server.evaluation import leakage as leaks
from server.evaluation.material import Material, TooFewTextsError
from server.evaluation.ranges import End, ranged
from server.evaluation.surface import shared_share
from server.quality import QualityNumber

FEWEST = 50
"""Documents of each side, and texts."""

_NO_LEAK, _COPY = End(0.5, "tells nothing"), End(1.0, "a copy")


def leakage(material: Material) -> Iterator[QualityNumber]:
    """All of them; none without the documents that the corpus was made from."""
    train, holdout = material.train, material.holdout or material.test
    if train is None:
        raise TooFewTextsError("leakage: left out; it needs the real texts that the corpus was made from (--train)")
    number = min(material.options.most, len(train), len(holdout))
    if min(number, len(material.corpus)) < FEWEST:
        raise TooFewTextsError(
            f"leakage: left out, as there are {len(material.corpus)} synthetic texts and {number} documents a side; at "
            f"least {FEWEST} of each are needed"
        )
    seed = material.options.seed
    members, others = train.drawn(number, seed), holdout.drawn(number, seed + 1)
    texts = material.corpus.drawn(material.options.most, seed)
    note = f"{len(texts)} synthetic texts, {number} documents of {train.name} and {number} of {holdout.name}"
    synthetic = material.embedded(texts, "corpus")
    inside, outside = material.embedded(members, "training texts"), material.embedded(others, "held-out texts")

    material.progress("nearest documents", 0, 1)
    to_inside, to_outside = distances.nearest_two(synthetic, inside), distances.nearest_two(synthetic, outside)
    share = leaks.nearer_share(to_inside[:, 0], to_outside[:, 0])
    yield ranged("DCR: texts nearer to training than to held-out", share, _COPY, _NO_LEAK, direction="lower", note=note)
    share = leaks.nearer_share(leaks.ratios(to_inside), leaks.ratios(to_outside))
    yield ranged("NNDR: texts near to one training text only", share, _COPY, _NO_LEAK, direction="lower", note=note)
    yield from _attacks(inside, outside, synthetic, note, seed)

    material.progress("shared runs of characters", 0, 1)
    runs = [leaks.shared_characters(texts.texts, side.texts) for side in (members, others)]
    share = leaks.nearer_share(-runs[0].astype(np.float64), -runs[1].astype(np.float64))
    yield ranged(
        "texts that share more characters with training than with held-out", share, _COPY, _NO_LEAK,
        direction="lower", note=note,
    )  # fmt: skip
    own = np.quantile([len(text) for text in texts.texts], 0.99)
    yield ranged(
        "longest run shared with training, 99 % of texts have less (characters)",
        float(np.quantile(runs[0], 0.99)),
        End(float(own), "copies"), End(float(np.quantile(runs[1], 0.99)), f"shared with {holdout.name}"),
        limits=(0.0, float(max(own, 1))), direction="lower", note=note,
    )  # fmt: skip
    yield ranged(
        "texts that are a training text",
        shared_share(texts, members), _COPY, End(shared_share(texts, others), f"that are one of {holdout.name}"),
        direction="lower", note=note,
    )  # fmt: skip


def _attacks(
    inside: distances.Vectors, outside: distances.Vectors, synthetic: distances.Vectors, note: str, seed: int
) -> Iterator[QualityNumber]:
    """Membership inference by the nearest synthetic text."""
    near = [distances.nearest_two(side, synthetic)[:, 0] for side in (inside, outside)]
    real = np.concatenate([inside, outside])
    # A document in a crowd of its like is near to anything; what counts is to be nearer than it is to other documents.
    usual = np.maximum(distances.nearest_two(real, real, themselves=True)[:, 0], 1e-3)
    usual_inside, usual_outside = usual[: len(inside)], usual[len(inside) :]
    attacks = {
        "distance": leaks.membership(-near[0], -near[1], seed),
        "distance ratio": leaks.membership(-near[0] / usual_inside, -near[1] / usual_outside, seed),
    }
    for name, attack in attacks.items():
        yield ranged(f"membership inference by {name}: AUC", attack.auc, _COPY, _NO_LEAK, direction="lower", note=note)
        if attack.tpr is not None:
            yield ranged(
                f"membership inference by {name}: found at 1 % false alarms", attack.tpr,
                End(1.0, "all are found"), End(leaks.FALSE_POSITIVES, "a guess"), direction="lower", note=note,
            )  # fmt: skip
