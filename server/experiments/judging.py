"""The step that judges a corpus by real texts that had no part in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.models.embedder import visible
from server.corpus import read_corpus
from server.evaluation.texts import Texts
from server.evaluation.vectors import Vectors
from server.experiments.cache import Earlier, Made, Step
from server.experiments.judges import Judged, judge
from server.experiments.notes import write_numbers
from server.experiments.places import embedder_of, embedder_sha256, folder_of
from server.experiments.sentences import LabelledSentences
from server.experiments.situation import CORPUS, JUDGEMENT, Situation
from server.workspace import Workspace


class Judgement(Step):
    """All numbers of a corpus."""

    kind = "judgement"
    sources = ("server/evaluation", "server/experiments/judges.py", "server/experiments/judging.py")

    def __init__(self, situation: Situation) -> None:
        self._situation = situation

    @property
    def name(self) -> str:
        """It is the last one."""
        return JUDGEMENT

    @property
    def rate(self) -> str:
        """Measures differ, and embedders."""
        judging = self._situation.experiment.judging
        return " ".join([*judging.measures, judging.embedder])

    @property
    def units(self) -> float:
        """Texts."""
        return float(self._situation.study.corpus.size + len(self._situation.data.test))

    def inputs(self, earlier: Earlier) -> dict[str, Any]:
        """Corpus, test texts, and how they are compared."""
        situation, judging = self._situation, self._situation.experiment.judging
        return {
            "corpus": earlier[CORPUS].sha256,
            "test": situation.data.test_sha256,
            "judging": judging.model_dump(mode="json", exclude={"attribute", "embedder"}),
            "embedder": embedder_sha256(judging.embedder),
            "attribute": situation.experiment.judged,
            "unseen": list(situation.unseen),
            "attacked": self._attacked,
            "entities": None if self._sentences is None else self._sentences.sha256,
            "seed": situation.seed,
        }

    def make(self, earlier: Earlier, out: Path, work: Path) -> None:
        """Run the measures."""
        situation, judging = self._situation, self._situation.experiment.judging
        judged = Judged(
            corpus=self._texts(earlier[CORPUS]),
            test=situation.data.test,
            attribute=situation.experiment.judged,
            unseen=frozenset(situation.unseen),
            vectors=Vectors(embedder_of(judging.embedder), situation.vectors),
            encoder=None if judging.encoder is None else folder_of(judging.encoder),
            sentences=self._sentences,
            attacked=situation.attacked if self._attacked else None,
            canaries=situation.canaries if self._attacked else None,
            most=judging.most,
            seed=situation.seed,
        )
        write_numbers(out, judge(judged, judging.measures))

    @property
    def _attacked(self) -> list[str] | None:
        """Whose documents leaks are looked for of; None if it isn't measured, or nobody learnt from any."""
        situation = self._situation
        if "leaks" not in situation.experiment.judging.measures or not situation.training_sites:
            return None
        return [site.sha256 for site in situation.training_sites]

    @property
    def _sentences(self) -> LabelledSentences | None:
        situation = self._situation
        return situation.data.entities if "entities" in situation.experiment.judging.measures else None

    def _texts(self, corpus: Made) -> Texts:
        codes = self._situation.study.codes
        rows = [(visible(text.text), text.code) for text in read_corpus(Workspace(corpus.folder), codes)]
        kept = [(text, code) for text, code in rows if text]
        labels = {
            name: tuple(codes.combinations[code][place] for _, code in kept) for place, name in enumerate(codes.names)
        }
        return Texts("corpus", tuple(text for text, _ in kept), labels)
