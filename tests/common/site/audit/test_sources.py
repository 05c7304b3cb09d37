"""What can't be read is one sentence that says what would be accepted and quotes no text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import DataError
from common.site.audit.sources import read_corpus, read_documents, read_holdout
from common.site.config import Site
from common.study import Study
from tests.hospitals import rows, small_study, write_site


def _site(folder: Path, documents: list[dict[str, Any]], columns: str = "") -> Site:
    file = write_site(folder, "north", "weak", documents)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("[policy]", f"identifier_columns = {columns or []}\n[policy]"), encoding="utf-8")
    return Site.load(file)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz", ".csv"])
def test_a_corpus_is_read_from_any_format_with_its_rows(tmp_path: Path, suffix: str) -> None:
    file, texts = tmp_path / f"corpus{suffix}", ["One  text.", "", "A\u202ethird\x1b[31m one"]
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), file)
    elif suffix == ".csv":
        file.write_text("id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(texts)), encoding="utf-8")
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        file.write_bytes(gzip.compress(lines) if suffix.endswith(".gz") else lines)
    corpus = read_corpus([file])
    assert corpus.texts == ("One text.", "Athird[31m one")
    assert corpus.rows == (1, 3)
    assert corpus.unreadable == 1


def test_rows_of_several_files_go_on(tmp_path: Path) -> None:
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for file in files:
        pq.write_table(pa.table({"text": [f"one of {file.stem}", f"two of {file.stem}"]}), file)
    assert read_corpus(files).rows == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b'{"note": "secret"}\n', "corpus.jsonl", "column 'text' is missing; the file has 'note'; a corpus has"),
        (b'{"text": ""}\n{"text": null}\n', "corpus.jsonl", "2 rows and no text in column 'text'"),
        (b"", "corpus.jsonl", "the file is empty"),
        (b"secret", "corpus.parquet", "can't be read as .parquet"),
        (b"secret", "corpus.docx", "isn't a known kind of file"),
        (None, "corpus.parquet", "no such file"),
    ],
)
def test_an_unusable_corpus_is_one_sentence(tmp_path: Path, content: bytes | None, name: str, message: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_corpus([file])
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_documents_are_all_that_the_file_has_by_patient(tmp_path: Path) -> None:
    documents = [*rows(4), {**rows(1, 9)[0], "topic": "undeclared"}]
    own = read_documents(_site(tmp_path, documents), None)
    assert len(own.texts) == 5
    assert own.units.tolist() == [0, 0, 1, 1, 2]


def test_with_a_study_only_documents_that_it_uses_count(tmp_path: Path) -> None:
    documents = [*rows(4), {**rows(1, 9)[0], "topic": "undeclared"}]
    study = Study.model_validate(small_study(tmp_path))
    own = read_documents(_site(tmp_path, documents), study)
    assert len(own.texts) == 4
    # This study's unit is the record.
    assert own.units.tolist() == [0, 1, 2, 3]


def test_a_document_of_several_codes_is_there_once(tmp_path: Path) -> None:
    documents = [{**row, "topic": ["staff", "parking"]} for row in rows(3)]
    attributes = [{"name": "topic", "values": ["staff", "parking"], "multiple": True}]
    study = Study.model_validate(
        small_study(tmp_path, codes={"attributes": attributes}, privacy={"codes_per_unit": 2, "unit": "patient"})
    )
    assert len(read_documents(_site(tmp_path, documents), study).texts) == 3


def test_identifier_columns_say_who_a_document_is_of(tmp_path: Path) -> None:
    documents = [{**row, "surname": f"Smith{'x' * i}"} for i, row in enumerate(rows(2))]
    own = read_documents(_site(tmp_path, documents, "['surname', 'patient']"), None)
    assert [{value.words for value in values} for values in own.values] == [{("smith",)}, {("smithx",)}]


def test_a_missing_identifier_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'surname' is missing; .* documents.identifier_columns"):
        read_documents(_site(tmp_path, rows(3), "['surname']"), None)


def test_no_documents_is_one_sentence(tmp_path: Path) -> None:
    site = _site(tmp_path, [{**row, "text": " \u200b "} for row in rows(3)])
    with pytest.raises(DataError, match="no documents: no text in column 'text'; at least one is needed"):
        read_documents(site, None)


def test_unreadable_documents_are_one_sentence(tmp_path: Path) -> None:
    site = _site(tmp_path, rows(3))
    site.documents.path.write_bytes(b"secret")
    with pytest.raises(DataError, match=r"can't be read as \.parquet") as caught:
        read_documents(site, None)
    assert "secret" not in str(caught.value)


def test_held_out_documents_need_the_text_column_and_a_text(tmp_path: Path) -> None:
    site, file = _site(tmp_path, rows(3)), tmp_path / "holdout.jsonl"
    file.write_text('{"note": "secret"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"held-out documents need the text column of site.toml"):
        read_holdout(file, site)
    file.write_text('{"text": ""}\n', encoding="utf-8")
    with pytest.raises(DataError, match="at least one held-out document is needed"):
        read_holdout(file, site)


def test_what_is_read_shows_sizes_only(tmp_path: Path) -> None:
    own = read_documents(_site(tmp_path, rows(3)), None)
    assert "Comment" not in repr(own)
    assert "3 private documents" in repr(own)
