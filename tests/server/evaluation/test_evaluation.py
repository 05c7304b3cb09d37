"""The command as a whole: good corpora beat bad ones on the numbers meant for that, and bad input is told."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from common.errors import DataError, UserError
from server.bundle.write import write_bundle
from server.evaluation.command import Arguments, run
from server.evaluation.material import Options
from server.evaluation.ranges import PERFECT, WORST, End, ranged
from server.evaluation.view import render_quality
from server.quality import Quality, QualityNumber, read_quality
from tests.finished_run import finished_run
from tests.server.bundle.finished import PUBLICATION

_WORDS = {
    "staff": "nurse doctor kind listened smiled helped explained ward team caring polite gentle",
    "parking": "car space ticket machine full costs barrier walk level far road sign",
    "food": "lunch cold soup tea menu breakfast taste warm vegetables meal tray late",
}
WORDS = {topic: words.split() for topic, words in _WORDS.items()}
_COMMON = "the was and very with my for when at home today visit again really they we"
COMMON = _COMMON.split()
QUIET = Console(quiet=True)

Rows = list[dict[str, str]]


def _rows(seed: int, number: int = 240) -> Rows:
    """Made-up comments, each with words of its topic."""
    chance = np.random.default_rng(seed)
    rows = []
    for i in range(number):
        topic = chance.choice(list(WORDS), p=[0.6, 0.3, 0.1])
        words = [*chance.choice(WORDS[topic], 3), *chance.choice(COMMON, int(chance.integers(3, 9)))]
        rows.append({"text": f"{' '.join(chance.permutation(words))} {seed}x{i}", "label": str(topic)})
    return rows


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Sequence[Mapping[str, Any]]], Path]:
    """Write rows as JSON lines."""

    def written(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return written


Write = Callable[[str, Sequence[Mapping[str, Any]]], Path]


def _numbers(quality: Quality) -> dict[str, QualityNumber]:
    return {number.name: number for number in quality.numbers}


def test_like_texts_score_like_real_ones(write: Write) -> None:
    files = {name: write(name, _rows(seed)) for seed, name in enumerate(("corpus", "test", "train"))}
    numbers = _numbers(run(Arguments(files["corpus"], files["test"], files["train"]), QUIET))
    for name in ("label: accuracy, TF-IDF + logistic regression", "label: macro-F1, wordllama + logistic regression"):
        assert numbers[name].share(numbers[name].value) > 0.8
        assert numbers[name].low is not None
    assert numbers["Fréchet distance to the real texts"].value < numbers["Fréchet distance to the real texts"].ceiling
    assert numbers["MAUVE"].value > 0.9
    assert "UNSTABLE" in numbers["MAUVE"].note
    assert numbers["control codes: total variation distance"].value < 0.15
    dcr = numbers["DCR: texts nearer to training than to held-out"]
    assert dcr.low is not None
    assert dcr.high is not None
    assert dcr.low < 0.55
    assert dcr.high > 0.45
    assert numbers["texts that are a training text"].value == 0


def test_a_corpus_that_copies_and_repeats_is_found_out(write: Write) -> None:
    train = _rows(2)
    files = {"train": write("train", train), "test": write("test", _rows(1))}
    corpus = write("corpus", [*train[:80]] * 3)
    numbers = _numbers(run(Arguments(corpus, files["test"], files["train"]), QUIET))
    assert numbers["exact duplicates in the corpus"].value > 0.6
    assert numbers["texts that are a training text"].value == 1
    assert numbers["DCR: texts nearer to training than to held-out"].value > 0.95
    assert numbers["membership inference by distance: AUC"].value > 0.6
    assert numbers["texts that share more characters with training than with held-out"].value > 0.95


def test_a_corpus_with_shuffled_labels_is_useless_and_still_looks_real(write: Write) -> None:
    rows = _rows(0)
    labels = np.random.default_rng(0).permutation([row["label"] for row in rows])
    corpus = write("corpus", [{**row, "label": str(label)} for row, label in zip(rows, labels, strict=True)])
    numbers = _numbers(run(Arguments(corpus, write("test", _rows(1)), write("train", _rows(2))), QUIET))
    f1 = numbers["label: macro-F1, TF-IDF + logistic regression"]
    assert f1.share(f1.value) < 0.4
    assert numbers["MAUVE"].value > 0.9


def test_without_training_texts_halves_are_compared_and_leaks_are_left_out(write: Write) -> None:
    quality = run(Arguments(write("corpus", _rows(0)), write("test", _rows(1))), QUIET)
    numbers = _numbers(quality)
    assert "120 texts a side" in numbers["MAUVE"].note
    assert "one half of the test texts" in numbers["MAUVE"].note
    assert not any("membership" in name for name in numbers)
    assert "leakage: left out" in quality.note
    assert "For its own operator" in quality.note or "for its own operator" in quality.note


def test_a_floor_corpus_is_the_floor(write: Write) -> None:
    floor = write("floor", [{**row, "text": "word " + row["text"].split()[-1]} for row in _rows(5)])
    arguments = Arguments(write("corpus", _rows(0)), write("test", _rows(1)), write("train", _rows(2)), floor=floor)
    numbers = _numbers(run(arguments, QUIET))
    accuracy = numbers["label: accuracy, TF-IDF + logistic regression"]
    assert accuracy.floor < accuracy.value
    assert "floor: trained on --floor floor.jsonl" in accuracy.note
    assert "--floor floor.jsonl" in numbers["Fréchet distance to the real texts"].note


def test_labels_that_the_corpus_lacks_are_wrong_answers(write: Write) -> None:
    corpus = write("corpus", [row for row in _rows(0) if row["label"] != "food"])
    numbers = _numbers(run(Arguments(corpus, write("test", _rows(1))), QUIET))
    found = numbers["label: macro-F1, TF-IDF + logistic regression"]
    assert found.value < 0.7
    assert "1 labels of the test texts aren't in the corpus and count as wrong" in found.note


def test_small_texts_lose_only_what_needs_more(write: Write) -> None:
    quality = run(Arguments(write("corpus", _rows(0, 30)), write("test", _rows(1, 60))), QUIET)
    numbers = _numbers(quality)
    assert "label: accuracy, TF-IDF + logistic regression" in numbers
    assert "MAUVE" not in numbers
    assert "distances in embedding space: left out, as 30 texts a side" in quality.note


BAD: dict[str, tuple[Rows, Rows, Rows | None, str]] = {
    "no label": ([{"text": "a"}] * 30, [{"text": "a"}] * 30, None, "column 'label' is missing"),
    "one class": (_rows(0), [{**row, "label": "staff"} for row in _rows(1)], None, "every text has label 'staff'"),
    "few texts": (_rows(0, 19), _rows(1), None, r"corpus.jsonl: 19 texts can be used; at least 20"),
    "few test texts": (_rows(0), _rows(1, 19), None, r"--test test.jsonl: 19 texts"),
    "the test itself": (_rows(1), _rows(1), None, "word for word"),
    "overlap": (_rows(0), _rows(1), [*_rows(2), _rows(1)[7]], "1 of the 240 texts of --test"),
    "other labels": (_rows(0), [{**row, "label": row["label"].upper()} for row in _rows(1)], None, "spelled the same"),
    "empty texts": ([{**row, "text": " "} for row in _rows(0)], _rows(1), None, "none of 240 rows has a text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told(case: str, write: Write) -> None:
    corpus, test, train, said = BAD[case]
    arguments = Arguments(
        write("corpus", corpus), write("test", test), None if train is None else write("train", train)
    )
    with pytest.raises(DataError, match=said):
        run(arguments, QUIET)


def test_an_overlap_can_be_left_out(write: Write) -> None:
    train = write("train", [*_rows(2), *_rows(1)[:40]])
    arguments = Arguments(write("corpus", _rows(0)), write("test", _rows(1)), train, drop_overlap=True)
    assert "tested on 200 of --test test.jsonl" in run(arguments, QUIET).note


def test_a_holdout_is_checked_and_used(write: Write) -> None:
    corpus, test, train = write("corpus", _rows(0)), write("test", _rows(1)), write("train", _rows(2))
    leaky = write("holdout", [*_rows(3), _rows(2)[0]])
    with pytest.raises(DataError, match="1 of the 241 texts of --holdout"):
        run(Arguments(corpus, test, train, leaky), QUIET)
    with pytest.raises(UserError, match="--holdout needs --train"):
        run(Arguments(corpus, test, None, leaky), QUIET)
    numbers = _numbers(run(Arguments(corpus, test, train, write("clean", _rows(3, 100))), QUIET))
    note = numbers["DCR: texts nearer to training than to held-out"].note
    assert "100 documents of --train train.jsonl and 100 of --holdout clean.jsonl" in note


def test_taught_models_are_there_when_asked_for(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from server.evaluation import fine_tuning, next_token
    from tests.tiny_embedder import make_tiny_embedder

    small = next_token.SmallModel(vocabulary=300, width=16, layers=1, heads=2, steps=3, batch=4)
    brief = fine_tuning.FineTuning(epochs=1)
    monkeypatch.setattr(next_token, "SmallModel", lambda seed: small)
    monkeypatch.setattr(fine_tuning, "FineTuning", lambda seed: brief)
    encoder = make_tiny_embedder(tmp_path_factory.mktemp("encoder") / "tiny")
    options = Options(encoder=encoder, next_token=True)
    numbers = _numbers(
        run(Arguments(write("corpus", _rows(0, 60)), write("test", _rows(1, 60)), options=options), QUIET)
    )
    assert "label: accuracy, tiny fine-tuned" in numbers
    assert 0 <= numbers["next-token accuracy of a small model"].value <= 1


def test_a_run_gets_its_numbers_and_a_bundle_does_not(tmp_path: Path, write: Write) -> None:
    texts = [row["text"] for row in _rows(0, 60)]
    space = finished_run(tmp_path / "run", values=list(WORDS), texts=texts, made=20, wanted=20)
    real = [{"words": row["text"], "theme": row["label"]} for row in [*_rows(1), {"text": "x", "label": "undeclared"}]]
    arguments = Arguments(
        space.root, write("test", real), text_column="words", label_columns=("topic=theme",), out=tmp_path / "out.json"
    )
    quality = run(arguments, QUIET)
    assert read_quality(space) == quality == Quality.model_validate_json((tmp_path / "out.json").read_bytes())
    assert "is the one that voted" in quality.note
    assert "tested on 240 of" in quality.note
    assert "1 rows couldn't be used" in quality.note
    space.progress.write_text(json.dumps({"at": 1.0}) + "\n")
    bundle = tmp_path / "bundle"
    write_bundle(space.root, bundle, PUBLICATION, None)
    before = {path.name for path in bundle.iterdir()}
    of_bundle = run(Arguments(bundle, arguments.test, text_column="words", label_columns=("topic=theme",)), QUIET)
    assert {n.name: n.value for n in of_bundle.numbers} == {n.name: n.value for n in quality.numbers}
    assert {path.name for path in bundle.iterdir()} == before
    with pytest.raises(UserError, match="--label-column theme: the study's attributes are"):
        run(Arguments(space.root, arguments.test, text_column="words", label_columns=("theme",)), QUIET)


def test_the_command_prints_a_table_or_json(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    from server.cli import app

    files = [write("corpus", _rows(0, 60)), write("test", _rows(1, 60))]
    app(["evaluate", str(files[0]), "--test", str(files[1]), "--json"], standalone_mode=False)
    captured = capsys.readouterr()
    quality = Quality.model_validate_json(captured.out)
    assert quality.numbers
    assert "release outside of every budget" in captured.err
    shown = Console(record=True, width=140, file=io.StringIO())
    render_quality(quality, shown)
    table = shown.export_text()
    for heading in ("floor", "value", "ceiling", "95 % interval", "better"):
        assert heading in table.splitlines()[2]
    for number in quality.numbers:
        assert number.name in table


def test_ends_that_are_upside_down_are_not_used() -> None:
    plain = ranged("n", 0.7, End(0.2, "floor corpus"), End(0.9, "real texts"))
    assert (plain.floor, plain.ceiling, plain.note) == (0.2, 0.9, "floor: floor corpus; ceiling: real texts")
    lower = ranged("n", 0.7, End(0.9, "bad"), End(0.2, "good"), direction="lower")
    assert (lower.floor, lower.ceiling, lower.note) == (0.2, 0.9, "ceiling: bad; floor: good")
    odd = ranged("n", 0.7, End(0.9, "floor corpus"), End(0.2, "real texts"))
    assert (odd.floor, odd.ceiling) == (0, 1)
    assert "floor corpus has 0.9, which is no worse than real texts (0.2)" in odd.note
    assert ranged("n", 0.5, WORST, PERFECT).share(0.5) == 0.5


def test_a_tagger_of_entities_is_there_when_asked_for(write: Write) -> None:
    sentences = [
        {
            "tokens": row["text"].split(),
            "tags": ["B-car" if w in ("car", "space") else "O" for w in row["text"].split()],
        }
        for row in _rows(4)
    ]
    public, real = write("public", sentences[:120]), write("real", sentences[120:])
    files = write("corpus", _rows(0)), write("test", _rows(1, 40))
    number = _numbers(run(Arguments(*files, entities=(public, real)), QUIET))["named entities: macro-F1 of a tagger"]
    assert number.value > 0.9
    assert "the public text's own tagger, from 120 sentences" in number.note or "no range" in number.note


def test_entities_need_both_files(write: Write) -> None:
    from server.cli import app

    corpus = str(write("corpus", _rows(0)))
    with pytest.raises(UserError, match="--ner and --ner-test go together"):
        app(["evaluate", corpus, "--test", corpus, "--ner", corpus], standalone_mode=False)
