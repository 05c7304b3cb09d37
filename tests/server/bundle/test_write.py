"""Writing a bundle: whole or not at all, the same bytes for the same run, and nothing in it belongs to one site."""

from __future__ import annotations

import gzip
import json
import resource
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.errors import BundleError, DataError, PrivacyError
from common.study import Study
from server.bundle import files, source, write
from server.bundle.verify import verify_bundle
from server.bundle.write import write_bundle
from tests.server.bundle.finished import PRIVACY, PUBLICATION, SITES, Finished, changed_run


def _bytes(folder: Path) -> dict[str, bytes]:
    found, _ = files.found_files(folder)
    return {name: (folder / name).read_bytes() for name in found}


def _rows(bundle: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.open(bundle / files.JSON_LINES)]


def test_a_bundle_has_these_files_and_no_other(bundle: Path) -> None:
    assert set(_bytes(bundle)) == {
        "README.md", "PRIVACY.md", "privacy_statement.json", "bundle.json", "croissant.json", "study.json",
        "data.jsonl.gz", "data/train-00000-of-00003.parquet", "data/train-00001-of-00003.parquet",
        "data/train-00002-of-00003.parquet", "signing_key.pub", "MANIFEST.sha256", "MANIFEST.sha256.sig",
    }  # fmt: skip


def test_the_parquet_is_zstd_and_plain(bundle: Path) -> None:
    for file in sorted((bundle / "data").iterdir()):
        parquet = pq.ParquetFile(file)
        group = parquet.metadata.row_group(0)
        assert {group.column(n).compression for n in range(group.num_columns)} == {"ZSTD"}
        assert not parquet.schema_arrow.metadata


def test_the_same_run_and_key_give_the_same_bytes(
    finished: Finished, bundle: Path, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    write_bundle(finished.run, tmp_path / "another-name", PUBLICATION, key, rows_per_shard=8)
    assert _bytes(tmp_path / "another-name") == _bytes(bundle)


def test_without_a_signature_only_what_names_the_key_differs(finished: Finished, bundle: Path, tmp_path: Path) -> None:
    write_bundle(finished.run, tmp_path / "unsigned", PUBLICATION, None, rows_per_shard=8)
    signed, unsigned = _bytes(bundle), _bytes(tmp_path / "unsigned")
    assert signed.keys() - unsigned.keys() == {files.SIGNATURE, files.PUBLIC_KEY}
    changed = {name for name, content in unsigned.items() if signed[name] != content}
    assert changed == {files.FACTS, files.CARD, files.MANIFEST}
    assert b"Not signed" in unsigned[files.CARD]


def test_nothing_in_a_bundle_belongs_to_one_site(finished: Finished, bundle: Path) -> None:
    content = b"".join([*_bytes(bundle).values(), gzip.decompress((bundle / files.JSON_LINES).read_bytes())])
    for name in SITES:
        # The run folder knows the sites, so the search can fail.
        assert name in (finished.run / "summary.json").read_text()
        assert name.encode() not in content
    assert b'"origin"' not in content
    statement = json.loads((bundle / files.STATEMENT).read_text())
    assert [(tier["tier"], tier["sites"]) for tier in statement["tiers"]] == [("strong", 1), ("weak", 1)]


def test_with_the_weights_the_codes_have_the_shares_of_the_noisy_sizes(finished: Finished, tmp_path: Path) -> None:
    run = changed_run(finished, tmp_path / "run", [("a", 0), ("b", 0), ("c", 0), ("d", 1), ("e", 3)])
    summary = json.loads((run / "summary.json").read_text())
    for code, profile in zip(summary["codes"], [10, 30, 0, -4], strict=True):
        # Votes have a say in a code's size, besides the profile.
        code["profile"] = 7
        code["size"] = profile
    (run / "summary.json").write_text(json.dumps(summary))
    write_bundle(run, tmp_path / "bundle", PUBLICATION, None)
    rows, weights = _rows(tmp_path / "bundle"), defaultdict(float)
    for row in rows:
        weights[row["topic"], row["tone"]] += row["weight"]
    assert weights == pytest.approx({("staff", "1"): 5 / 4, ("staff", "2"): 15 / 4, ("parking", "2"): 0.0})
    assert verify_bundle(tmp_path / "bundle").holds


@pytest.mark.parametrize(
    ("profile", "counts", "weights"),
    [
        ([5, 5], [5, 5], [1, 1]),
        ([-1, -5], [2, 0], [1, 1]),
        ([0, 0], [0, 0], [1, 1]),
        ([2**62, 2**62], [1, 3], [2, 2 / 3]),
        ([3, 100], [7, 0], [1, 1]),
    ],
)
def test_weights_of_codes_add_up_to_the_number_of_texts(
    profile: list[int], counts: list[int], weights: list[float]
) -> None:
    found = source.code_weights(np.array(profile), np.array(counts))
    assert found == pytest.approx(weights)
    assert np.dot(found, counts) == pytest.approx(sum(counts))


def test_a_document_may_have_several_codes_and_a_text_has_one(finished: Finished, tmp_path: Path) -> None:
    attributes = [
        {"name": "topic", "values": ["staff", "parking"], "multiple": True},
        {"name": "tone", "values": ["1", "2"]},
    ]
    texts, privacy = [("a", 0), ("b", 3)], PRIVACY | {"codes_per_unit": 2}
    run = changed_run(finished, tmp_path / "run", texts, codes={"attributes": attributes}, privacy=privacy)
    write_bundle(run, tmp_path / "bundle", PUBLICATION, None)
    rows = [{k: v for k, v in row.items() if k != "weight"} for row in _rows(tmp_path / "bundle")]
    assert rows == [
        {"id": "0", "text": "a", "topic": "staff", "tone": "1"},
        {"id": "1", "text": "b", "topic": "parking", "tone": "2"},
    ]
    card = (tmp_path / "bundle" / files.CARD).read_text()
    assert card.count("of which documents may have several and a text has one") == 1
    assert verify_bundle(tmp_path / "bundle").holds


def test_a_corpus_with_holes_is_refused_unless_it_is_asked_for_and_then_the_card_says_so(
    finished: Finished, tmp_path: Path
) -> None:
    run = changed_run(finished, tmp_path / "run", [("a", 0), ("b", 1)], missing={1: 3, 2: 4})
    with pytest.raises(DataError, match=r"7 texts are missing, under 2 of 4 codes.*--allow-holes"):
        write_bundle(run, tmp_path / "bundle", PUBLICATION, None)
    assert not (tmp_path / "bundle").exists()
    facts = write_bundle(run, tmp_path / "bundle", PUBLICATION, None, allow_holes=True)
    assert facts.missing == {"topic=staff, tone=2": 3, "topic=parking, tone=1": 4}
    assert "**7 texts are missing**" in (tmp_path / "bundle" / files.CARD).read_text()
    assert verify_bundle(tmp_path / "bundle").holds


def test_a_corpus_without_a_text_can_be_published_as_such(finished: Finished, tmp_path: Path) -> None:
    run = changed_run(finished, tmp_path / "run", [], missing={0: 1})
    assert write_bundle(run, tmp_path / "bundle", PUBLICATION, None, allow_holes=True).texts == 0
    assert verify_bundle(tmp_path / "bundle").holds


def _in_the_way(kind: str) -> Callable[[Path], None]:
    return {
        "a folder": lambda out: out.mkdir(),
        "a file": lambda out: out.touch(),
        "a dangling link": lambda out: out.symlink_to("nowhere"),
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", ["a folder", "a file", "a dangling link"])
def test_nothing_is_ever_overwritten(finished: Finished, tmp_path: Path, kind: str) -> None:
    _in_the_way(kind)(tmp_path / "bundle")
    with pytest.raises(DataError, match=r"bundle: exists already"):
        write_bundle(finished.run, tmp_path / "bundle", PUBLICATION, None)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_a_folder_to_be_in_is_needed(finished: Finished, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the folder that it would be in"):
        write_bundle(finished.run, tmp_path / "no" / "bundle", PUBLICATION, None)


def _drop_summary(run: Path) -> None:
    (run / "summary.json").unlink()


def _drop_progress(run: Path) -> None:
    (run / "progress.jsonl").unlink()


def _end_progress_badly(run: Path) -> None:
    (run / "progress.jsonl").write_text('{"at": "soon"}\n')


def _add_a_text(run: Path) -> None:
    lines = (run / "corpus.jsonl").read_text()
    (run / "corpus.jsonl").write_text(lines + lines.split("\n")[0] + "\n")


def _claim_more(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"epsilon": 8.1}))


def _fewer_codes(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"codes": summary["codes"][:-1]}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop_summary, "no run that has finished"),
        (_drop_progress, "when the run was finished"),
        (_end_progress_badly, "when the run was finished"),
        (_add_a_text, "one of the files was changed"),
        (_claim_more, "this study allows 0\\."),
        (_fewer_codes, "3 codes, the study 4"),
    ],
)
def test_a_run_that_is_unfinished_or_damaged_is_refused_and_nothing_is_left(
    finished: Finished, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    run = changed_run(finished, tmp_path / "run", [("a", 0), ("b", 1)])
    change(run)
    with pytest.raises(DataError, match=said):
        write_bundle(run, tmp_path / "bundle", PUBLICATION, None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_claim_that_the_second_accountant_does_not_confirm_is_not_published(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "second_epsilon", lambda tier: tier.epsilon + 0.1)
    with pytest.raises(PrivacyError, match=r"second accountant gives epsilon 0\.\d+ for a strong site"):
        write_bundle(finished.run, tmp_path / "bundle", PUBLICATION, None)
    assert not list(tmp_path.iterdir())


@contextmanager
def _disk_of(bytes_of_a_file: int) -> Iterator[None]:
    """No file may grow beyond this: what follows is the system's own error, from every writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_of_a_file, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [0, 300, 1500, 4000], ids=["texts", "parquet", "json lines or facts", "card"])
def test_a_full_disk_is_reported_and_nothing_half_made_is_left(finished: Finished, tmp_path: Path, limit: int) -> None:
    with _disk_of(limit), pytest.raises(BundleError, match=r"bundle: the bundle can't be written \(.*nothing is left"):
        write_bundle(finished.run, tmp_path / "bundle", PUBLICATION, None)
    assert not list(tmp_path.iterdir())
    write_bundle(finished.run, tmp_path / "bundle", PUBLICATION, None)


def test_an_interrupted_release_leaves_nothing(finished: Finished, tmp_path: Path) -> None:
    def interrupt(_written: int, _all: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_bundle(finished.run, tmp_path / "bundle", PUBLICATION, None, on_text=interrupt)
    assert not list(tmp_path.iterdir())


def test_texts_are_streamed_through_little_memory(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten megabytes of long texts, of which a lot is there at a time."""
    monkeypatch.setattr(write, "CHARACTERS_AT_ONCE", 200_000)
    long = "word " * 10_000
    run = changed_run(finished, tmp_path / "run", [(f"{number} {long}", number % 4) for number in range(200)])
    written, held, before = [0], [], pa.total_allocated_bytes()

    def look(texts: int, _all: int) -> None:
        written.append(texts)
        held.append(pa.total_allocated_bytes() - before)

    write_bundle(run, tmp_path / "bundle", PUBLICATION, None, on_text=look)
    assert written == list(range(0, 201, 4))
    assert max(held) < 1_000_000
    assert verify_bundle(tmp_path / "bundle").holds


def test_a_text_that_no_reader_has_to_take_is_refused(finished: Finished, tmp_path: Path) -> None:
    run = changed_run(finished, tmp_path / "run", [("a", 0), ("x" * (files.MOST_LINE + 1), 1)])
    with pytest.raises(DataError, match=r"text 1 has more than 16 MiB"):
        write_bundle(run, tmp_path / "bundle", PUBLICATION, None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_corpus_that_changes_meanwhile_is_refused(finished: Finished, tmp_path: Path) -> None:
    run = changed_run(finished, tmp_path / "run", [("a", 0), ("b", 1), ("c", 1)])

    def add_one(written: int, _all: int) -> None:
        if written == 1:
            _add_a_text(run)

    with pytest.raises(DataError, match="changed while it was read"):
        write_bundle(run, tmp_path / "bundle", PUBLICATION, None, on_text=add_one, rows_per_shard=1)


def test_a_study_of_thousands_of_codes_has_a_short_card(finished: Finished, tmp_path: Path) -> None:
    attributes = [{"name": "topic", "values": [f"topic {n}" for n in range(3000)]}]
    size = {"size": 3000}
    study = json.loads((finished.run / "study.json").read_text())
    run = changed_run(
        finished, tmp_path / "run", [(f"text {n}", n) for n in range(0, 3000, 2)],
        missing=dict.fromkeys(range(1, 3000, 2), 1), codes={"attributes": attributes}, pool=study["pool"] | size,
    )  # fmt: skip
    write_bundle(run, tmp_path / "bundle", PUBLICATION, None, allow_holes=True)
    card = (tmp_path / "bundle" / files.CARD).read_text()
    assert "2970 more codes" in card
    assert "and 1470 more codes" in card
    assert len(card) < 30_000
    assert Study.from_canonical((tmp_path / "bundle" / files.STUDY).read_text()).codes.names == ("topic",)
