"""What is measured of a corpus in an experiment. A new measure is a function and a line in `JUDGES`.

The same numbers as `fedcorpus evaluate` gives, from the same functions. Here they are bare, since what gives them a
range are the experiment's other cells: zero-shot below, real documents above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np

from server.evaluation import distances, leakage, mauve, ner, surface, utility
from server.evaluation.texts import Texts
from server.evaluation.vectors import Vectors
from server.experiments.canaries import Canaries
from server.experiments.sentences import LabelledSentences

Numbers: TypeAlias = Iterator[tuple[str, float]]
Judge: TypeAlias = Callable[["Judged"], Numbers]

LEAKS = ("membership", "members found", "texts nearer", "exposure", "canaries")
"""How names of numbers begin that tell of leaks."""

LOWER_IS_BETTER = ("Fréchet distance", "codes off", "near duplicates", "exact duplicates", "lengths off", *LEAKS)
"""How names of numbers begin that are good when they are small."""


@dataclass(frozen=True)
class Judged:
    """A corpus and the real texts that judge it.

    Attributes
    ----------
    attribute
        What classifiers are taught to tell.
    unseen
        Its values of which no site that trained had a document.
    encoder
        Folder of an encoder to fine-tune.
    sentences
        With their entities, for taggers.
    attacked
        As many documents that were learnt from as test texts; None if leaks aren't measured, or nobody learnt.
    canaries
        Secrets that were planted among the documents.
    most
        Texts a side that are compared.
    """

    corpus: Texts
    test: Texts
    attribute: str
    unseen: frozenset[str]
    vectors: Vectors
    encoder: Path | None
    sentences: LabelledSentences | None
    attacked: tuple[Texts, Texts] | None
    canaries: Canaries | None
    most: int
    seed: int

    @property
    def labels(self) -> Sequence[str]:
        """Of the corpus."""
        return self.corpus.labels[self.attribute]

    @property
    def true(self) -> Sequence[str]:
        """Labels of the test texts."""
        return self.test.labels[self.attribute]

    @cached_property
    def sides(self) -> tuple[Texts, Texts]:
        """As many texts of the corpus as test texts, drawn by chance."""
        number = min(self.most, len(self.corpus), len(self.test))
        return self.corpus.drawn(number, self.seed), self.test.drawn(number, self.seed)


def tfidf(judged: Judged) -> Numbers:
    """A classifier on TF-IDF that is trained on the corpus."""
    predicted = utility.tfidf_predictions(judged.corpus.texts, judged.labels, judged.test.texts)
    yield from _scores(judged, predicted, "TF-IDF")


def features(judged: Judged) -> Numbers:
    """A classifier on the embedder's features that is trained on the corpus."""
    of_corpus, of_test = judged.vectors(judged.corpus.texts), judged.vectors(judged.test.texts)
    yield from _scores(judged, utility.vector_predictions(of_corpus, judged.labels, of_test), "features")


def fine_tuned(judged: Judged) -> Numbers:
    """A small pretrained encoder that is fine-tuned on the corpus; minutes."""
    from server.evaluation.fine_tuning import FineTuning, fine_tuned_predictions

    if judged.encoder is None:
        return
    options = FineTuning(seed=judged.seed)
    predicted = fine_tuned_predictions(judged.encoder, judged.corpus.texts, judged.labels, judged.test.texts, options)
    yield from _scores(judged, predicted, "fine-tuned")


def distance(judged: Judged) -> Numbers:
    """How near corpus and real texts are in the embedder's space."""
    corpus, test = (judged.vectors(side.texts) for side in judged.sides)
    yield "Fréchet distance", distances.frechet(test, corpus)
    if len(corpus) > distances.NEIGHBOURS:
        found = distances.neighbourhoods(test, corpus)
        yield "precision", found.precision.value
        yield "recall", found.recall.value


def divergence(judged: Judged) -> Numbers:
    """MAUVE; half a minute."""
    corpus, test = (judged.vectors(side.texts) for side in judged.sides)
    if len(corpus) >= mauve.FEWEST:
        yield "MAUVE", mauve.mauve(test, corpus).estimate.value


def codes(judged: Judged) -> Numbers:
    """How far the shares of the codes are from the real ones."""
    yield "codes off", surface.variation(judged.test.codes, judged.corpus.codes)


def wording(judged: Judged) -> Numbers:
    """Lengths, variety and repetition."""
    corpus, test = judged.sides
    yield "lengths off", surface.length_distance(surface.lengths(test.texts), surface.lengths(corpus.texts))
    runs = min(surface.run_count(side.texts, 2) for side in judged.sides)
    yield "distinct-2", surface.distinct(corpus.texts, 2, runs)
    yield "exact duplicates", surface.duplicates(corpus)
    yield "near duplicates", surface.near_duplicates(corpus)


def next_token(judged: Judged) -> Numbers:
    """Next-token accuracy of a small model that has read only the corpus; a minute."""
    from server.evaluation import next_token as tokens

    options = tokens.SmallModel(seed=judged.seed)
    tokenizer = tokens.Tokenizer(judged.test.texts, options)
    read, tests = tokenizer(judged.corpus.texts), tokenizer(judged.test.texts)
    found = tokens.taught_accuracy(read, tests, len(tokenizer), options, lambda done, total: None)
    yield "next-token accuracy", found.value


def entities(judged: Judged) -> Numbers:
    """A tagger that is trained on the corpus, as a first one that learnt from public sentences labels it."""
    if judged.sentences is None:
        return
    test = judged.sentences.test
    labelled = ner.relabelled(judged.sentences.teacher, judged.corpus.texts)
    found = ner.Tagger(labelled, judged.seed)(test.tokens)
    yield "entities' macro-F1", ner.macro_f1(test.tags, found.tags).value


def leaks(judged: Judged) -> Numbers:
    """What the corpus tells of the documents; what the model does, `server.experiments.attacks` has."""
    if judged.attacked is None:
        return
    corpus = judged.vectors(judged.sides[0].texts)
    inside, outside = (judged.vectors(side.texts) for side in judged.attacked)
    to_inside, to_outside = (distances.nearest_two(corpus, side)[:, 0] for side in (inside, outside))
    yield "texts nearer to documents", leakage.nearer_share(to_inside, to_outside).value
    near = [distances.nearest_two(side, corpus)[:, 0] for side in (inside, outside)]
    attack = leakage.membership(-near[0], -near[1], judged.seed)
    yield "membership AUC, corpus", attack.auc.value
    if attack.tpr is not None:
        yield "members found at 1 %, corpus", attack.tpr.value
    if judged.canaries is not None:
        scores = leakage.canary_scores(judged.canaries.all, judged.corpus.texts)
        planted, references = np.split(scores, [len(judged.canaries.planted)])
        yield "exposure, corpus", leakage.mean_exposure(planted, references)
        yield "canaries in the corpus", float((planted == 1).sum())


JUDGES: Mapping[str, Judge] = {
    "tfidf": tfidf,
    "features": features,
    "fine-tuned": fine_tuned,
    "distances": distance,
    "mauve": divergence,
    "codes": codes,
    "wording": wording,
    "next-token": next_token,
    "entities": entities,
    "leaks": leaks,
}


def judge(judged: Judged, measures: Sequence[str]) -> dict[str, float]:
    """All numbers of these measures, by name."""
    return {name: float(value) for measure in measures for name, value in JUDGES[measure](judged)}


def _scores(judged: Judged, predicted: Sequence[str], classifier: str) -> Numbers:
    table = utility.confusion(judged.true, predicted)
    yield f"accuracy, {classifier}", float(utility.accuracy(table[None])[0])
    yield f"macro-F1, {classifier}", float(utility.macro_f1(table[None])[0])
    places = [place for place, label in enumerate(sorted(set(judged.true))) if label in judged.unseen]
    if places:
        # Each class alike, however rare: it is about those that nobody trained on.
        yield (
            f"recall of unseen classes, {classifier}",
            float(np.mean([table[place, place] / table[place].sum() for place in places])),
        )
