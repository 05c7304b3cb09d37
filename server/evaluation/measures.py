"""What is measured of utility and fidelity, and against what. A new measure is a function and a line in `MEASURES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TypeAlias

from common.errors import MissingExtraError
from server.evaluation import distances, mauve, surface, utility
from server.evaluation.leakage_measures import leakage
from server.evaluation.material import Material, TooFewTextsError
from server.evaluation.ranges import PERFECT, WORST, End, ranged
from server.evaluation.taught_measures import entities, next_token
from server.evaluation.texts import Texts, unknown_labels
from server.quality import QualityNumber

Measure: TypeAlias = Callable[[Material], Iterator[QualityNumber]]
Predict: TypeAlias = Callable[[Texts, Sequence[str], Sequence[str], str], list[str]]
"""(training texts, their labels, test texts, what they are) -> label of each test text."""

FEWEST_COMPARED = 50
"""Texts of each side, without which distances in embedding space say nothing."""

_OWN_LIMITS = {"precision": 1.0, "recall": 1.0, "density": 2.0, "coverage": 1.0}


def tfidf_utility(material: Material) -> Iterator[QualityNumber]:
    """Logistic regression on TF-IDF, trained on the corpus and tested on real texts."""

    def predict(texts: Texts, labels: Sequence[str], tests: Sequence[str], what: str) -> list[str]:
        material.progress(f"TF-IDF classifier of {what}", 0, 1)
        return utility.tfidf_predictions(texts.texts, labels, tests)

    yield from _utility(material, predict, "TF-IDF + logistic regression")


def vector_utility(material: Material) -> Iterator[QualityNumber]:
    """Logistic regression on a pretrained encoder's features, trained on the corpus and tested on real texts."""

    def predict(texts: Texts, labels: Sequence[str], tests: Sequence[str], what: str) -> list[str]:
        of_texts, of_tests = material.embedded(texts, what), material.embedded(tests, "test texts")
        return utility.vector_predictions(of_texts, labels, of_tests)

    yield from _utility(material, predict, f"{_short(material.vectors.name)} + logistic regression")


def fine_tuned_utility(material: Material) -> Iterator[QualityNumber]:
    """A small pretrained encoder, fine-tuned on the corpus and tested on real texts."""
    folder = material.options.encoder
    if folder is None:
        return
    try:
        from server.evaluation.fine_tuning import FineTuning, fine_tuned_predictions
    except ImportError as cause:
        raise MissingExtraError("--fine-tune needs torch; pip install 'fedcorpus[coordinator]'") from cause

    def predict(texts: Texts, labels: Sequence[str], tests: Sequence[str], what: str) -> list[str]:
        return fine_tuned_predictions(
            folder, texts.texts, labels, tests, FineTuning(seed=material.options.seed),
            lambda done, total: material.progress(f"fine-tuning on {what}", done, total),
        )  # fmt: skip

    yield from _utility(material, predict, f"{folder.name} fine-tuned")


def distribution(material: Material) -> Iterator[QualityNumber]:
    """Fréchet distance, and precision, recall, density and coverage, in embedding space."""
    sets, name = material.comparison, _short(material.vectors.name)
    _enough(len(sets), FEWEST_COMPARED, "distances in embedding space")
    target, corpus = material.embedded(sets.target, "test texts"), material.embedded(sets.corpus, "corpus")
    real, bad = material.embedded(sets.real, "real texts"), material.embedded(sets.bad, "bad texts")
    note = f"{len(sets)} texts a side; biased by that number, as its ends are; {name} features"
    material.progress("Fréchet distance", 0, 1)
    yield ranged(
        "Fréchet distance to the real texts",
        distances.frechet_estimate(target, corpus),
        End(distances.frechet(target, bad), sets.bad_words),
        End(distances.frechet(target, real), sets.real_words),
        limits=(0.0, 4.0), direction="lower", note=note,
    )  # fmt: skip
    material.progress("neighbourhoods", 0, 1)
    found, best, worst = (distances.neighbourhoods(target, other) for other in (corpus, real, bad))
    for field in fields(found):
        low = End(getattr(worst, field.name).value, sets.bad_words) if material.floor is not None else WORST
        yield ranged(
            f"{field.name} among the {distances.NEIGHBOURS} nearest real texts",
            getattr(found, field.name), low, End(getattr(best, field.name).value, sets.real_words),
            limits=(0.0, _OWN_LIMITS[field.name]), note=note,
        )  # fmt: skip


def divergence_frontier(material: Material) -> Iterator[QualityNumber]:
    """MAUVE."""
    sets, name = material.comparison, _short(material.vectors.name)
    _enough(len(sets), mauve.FEWEST, "MAUVE")
    target = material.embedded(sets.target, "test texts")

    def of(texts: Texts, what: str) -> mauve.Mauve:
        vectors = material.embedded(texts, what)
        return mauve.mauve(target, vectors, progress=lambda d: material.progress(f"MAUVE of {what}", d, mauve.SEEDS))

    found, best = of(sets.corpus, "corpus"), of(sets.real, "real texts")
    seeds = f"{min(found.by_seed):.3f} to {max(found.by_seed):.3f} over {mauve.SEEDS} seeds"
    few = f"; UNSTABLE below {mauve.STABLE} texts: compare no two corpora by it" if len(sets) < mauve.STABLE else ""
    yield ranged(
        "MAUVE",
        found.estimate,
        End(of(sets.bad, "bad texts").estimate.value, sets.bad_words),
        End(best.estimate.value, sets.real_words),
        note=f"{len(sets)} texts a side, {name} features, {seeds}{few}",
    )


def labels(material: Material) -> Iterator[QualityNumber]:
    """How far the shares of the control codes are from the real ones."""
    sets = material.comparison
    if not sets.target.labels:
        return
    codes = sets.target.codes
    bad = End(surface.variation_from_even(codes), "all codes equally often")
    if material.floor is not None:
        bad = End(surface.variation(codes, sets.bad.codes), sets.bad_words)
    yield ranged(
        "control codes: total variation distance",
        surface.variation_estimate(codes, sets.corpus.codes, material.options.seed),
        bad, End(surface.variation(codes, sets.real.codes), sets.real_words),
        direction="lower", note=f"{len(sets)} texts a side",
    )  # fmt: skip


def wording(material: Material) -> Iterator[QualityNumber]:
    """Lengths, variety and repetition."""
    sets, note = material.comparison, f"{len(material.comparison)} texts a side"
    target, corpus, real, bad = (surface.lengths(t.texts) for t in (sets.target, sets.corpus, sets.real, sets.bad))
    typical = sorted(target)[len(target) // 2]
    one_length = surface.length_distance(target, target * 0 + typical)
    floor = End(surface.length_distance(target, bad), sets.bad_words)
    yield ranged(
        "lengths: Wasserstein distance in words",
        surface.length_distance_estimate(target, corpus),
        floor if material.floor is not None else End(one_length, "all texts of the median length"),
        End(surface.length_distance(target, real), sets.real_words),
        limits=(0.0, float(max(*target, *corpus))), direction="lower", note=note,
    )  # fmt: skip
    for size in (1, 2):
        most = min(surface.run_count(t.texts, size) for t in (sets.target, sets.corpus, sets.real, sets.bad))
        bad_share = End(surface.distinct(sets.bad.texts, size, most), sets.bad_words)
        yield ranged(
            f"distinct-{size}",
            surface.distinct(sets.corpus.texts, size, most),
            bad_share if material.floor is not None else WORST,
            End(surface.distinct(sets.real.texts, size, most), sets.real_words.split(" against ")[0]),
            note=f"{most} runs of {size} words",
        )
    for name, share in (("exact duplicates", surface.duplicates), ("near duplicates", surface.near_duplicates)):
        yield ranged(
            f"{name} in the corpus", share(sets.corpus), End(1.0, "nothing else"),
            End(share(sets.real), sets.real_words.split(" against ")[0]), direction="lower", note=note,
        )  # fmt: skip


MEASURES: Mapping[str, Measure] = {
    "utility by TF-IDF": tfidf_utility,
    "utility by features": vector_utility,
    "utility by fine-tuning": fine_tuned_utility,
    "next-token accuracy": next_token,
    "named entities": entities,
    "distances in embedding space": distribution,
    "MAUVE": divergence_frontier,
    "control codes": labels,
    "wording": wording,
    "leakage": leakage,
}
"""In the order they are shown in."""


def _utility(material: Material, predict: Predict, classifier: str) -> Iterator[QualityNumber]:
    corpus, test, train, floor = material.corpus, material.test, material.train, material.floor
    for attribute, true in test.labels.items():
        unknown = unknown_labels(corpus, test, attribute)

        def scored(texts: Texts, what: str, attribute: str = attribute, true: Sequence[str] = true) -> utility.Score:
            predicted = predict(texts, texts.labels[attribute], test.texts, what)
            return utility.score(true, predicted, material.options.seed)

        found = scored(corpus, "corpus")
        ceiling = scored(train, "real texts") if train is not None else None
        if floor is not None:
            least, least_words = scored(floor, "floor"), f"trained on {floor.name}"
        else:
            always = utility.majority_predictions(true, len(true))
            least, least_words = utility.score(true, always), "always the largest class"
        note = f"{len(corpus)} synthetic texts, {len(test)} test texts"
        if unknown:
            note += f"; {len(unknown)} labels of the test texts aren't in the corpus and count as wrong"
        for name in ("accuracy", "macro_f1"):
            good = PERFECT
            if ceiling is not None and train is not None:
                good = End(getattr(ceiling, name).value, f"trained on {len(train)} texts of {train.name}")
            yield ranged(
                f"{attribute}: {name.replace('_f1', '-F1')}, {classifier}",
                getattr(found, name), End(getattr(least, name).value, least_words), good, note=note,
            )  # fmt: skip


def _enough(number: int, fewest: int, what: str) -> None:
    if number < fewest:
        raise TooFewTextsError(
            f"{what}: left out, as {number} texts a side can be compared (without --train, the test texts are halved); "
            f"at least {fewest} are needed"
        )


def _short(embedder: str) -> str:
    """An embedder's name without its folders."""
    kind, _, model = embedder.partition(":")
    parts = [part for part in model.split("/") if part]
    return f"{kind}:{parts[-1]}" if parts else kind
