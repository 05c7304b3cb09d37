"""What models that the corpus taught know of real text: its next tokens, and its named entities."""

from __future__ import annotations

from collections.abc import Iterator

from common.errors import MissingExtraError
from server.evaluation import ner
from server.evaluation.intervals import Estimate
from server.evaluation.material import Material
from server.evaluation.ranges import PERFECT, End, ranged
from server.evaluation.texts import Texts
from server.quality import QualityNumber


def next_token(material: Material) -> Iterator[QualityNumber]:
    """Next-token accuracy of a small model taught on the corpus."""
    if not material.options.next_token:
        return
    try:
        from server.evaluation import next_token as tokens
    except ImportError as cause:
        raise MissingExtraError("--next-token needs torch; pip install 'fedcorpus[coordinator]'") from cause
    options = tokens.SmallModel(seed=material.options.seed)
    tokenizer = tokens.Tokenizer(material.test.texts, options)
    tests = tokenizer(material.test.texts)

    def taught(texts: Texts, what: str) -> Estimate:
        return tokens.taught_accuracy(
            tokenizer(texts.texts), tests, len(tokenizer), options,
            lambda done, total: material.progress(f"next tokens of {what}", done, total),
        )  # fmt: skip

    corpus = tokenizer(material.corpus.texts)
    bad = End(tokens.most_frequent_accuracy(corpus, tests), "always the most frequent token")
    if material.floor is not None:
        bad = End(taught(material.floor, "floor").value, material.floor.name)
    good = PERFECT if material.train is None else End(taught(material.train, "real texts").value, material.train.name)
    yield ranged(
        "next-token accuracy of a small model", taught(material.corpus, "corpus"), bad, good,
        note=f"{options.layers} layers of width {options.width}, {options.steps} steps of {options.batch} texts",
    )  # fmt: skip


def entities(material: Material) -> Iterator[QualityNumber]:
    """Macro-F1 of a tagger of named entities trained on the corpus, as a public tagger labels it."""
    if material.options.entities is None:
        return
    (public, test), seed = material.options.entities, material.options.seed
    material.progress("tagger of the public text", 0, 1)
    teacher = ner.Tagger(public, seed)

    def scored(tagger: ner.Tagger) -> Estimate:
        return ner.macro_f1(test.tags, tagger(test.tokens).tags, seed)

    def taught(texts: Texts, what: str) -> Estimate:
        material.progress(f"tagger of {what}", 0, 1)
        return scored(ner.Tagger(ner.relabelled(teacher, texts.texts), seed))

    bad = End(0.0, "no entity is found")
    if material.floor is not None:
        bad = End(taught(material.floor, "floor").value, f"trained on {material.floor.name}")
    good = End(scored(teacher).value, f"the public text's own tagger, from {len(public)} sentences")
    note = f"{len(material.corpus)} synthetic texts, {len(test)} test sentences"
    yield ranged("named entities: macro-F1 of a tagger", taught(material.corpus, "corpus"), bad, good, note=note)
