"""Documents: the same rows give the same documents in every format, and nothing that is read is quoted."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import DataError
from common.site import formats as module
from common.site.config import Site
from common.site.documents import Documents, RowProblem
from common.site.formats import SUFFIXES, Problem, as_text, read_columns
from common.study import Study

SECRET = "Mrs Zwiebelfisch of bed 12"
PUBLIC_TEXT = Path(__file__).parents[4] / "shared" / "data" / "nhs_feedback_9class.jsonl.gz"
ROWS: list[dict[str, Any]] = [
    {"text": "Kind nurses.", "topic": "Staff", "stars": 4, "patient": "a"},
    {"text": 'Cold food,\n"again"', "topic": "Food", "stars": 1, "patient": "b"},
    {"text": "  Grüße ", "topic": " Staff ", "stars": 1, "patient": "a"},
    {"text": "No parking", "topic": "Parking", "stars": 1, "patient": "c"},
    {"text": " ", "topic": "Staff", "stars": 1, "patient": "c"},
    {"text": "No code", "topic": None, "stars": 1, "patient": "c"},
    {"text": "No patient", "topic": "Food", "stars": 4, "patient": ""},
]


def study(unit: str = "record", stars: Sequence[Any] = (1, 4)) -> Study:
    return Study.model_validate(
        {
            "name": "test",
            "codes": {
                "attributes": [
                    {"name": "topic", "values": ["Staff", "Food"]},
                    {"name": "stars", "values": list(stars)},
                ]
            },
            "privacy": {"epsilon": 4, "delta": 1e-5, "unit": unit},
            "generator": {"base": "tiny"},
        }
    )


def site(path: Path, **documents: Any) -> Site:
    return Site.model_validate(
        {
            "name": "hospital",
            "tier": "weak",
            "size_class": 100,
            "state": "/state",
            "documents": {"path": path, "patient_column": "patient"} | documents,
            "policy": {"max_epsilon": 10, "max_delta": 1e-4},
        }
    )


def as_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def as_json_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), stream)
    return stream.getvalue()


WRITERS: dict[str, Callable[[Sequence[Mapping[str, Any]]], bytes]] = {
    ".parquet": as_parquet,
    ".csv": as_csv,
    ".csv.gz": lambda rows: gzip.compress(as_csv(rows)),
    ".jsonl": as_json_lines,
    ".ndjson": as_json_lines,
    ".json": as_json_lines,
    ".jsonl.gz": lambda rows: gzip.compress(as_json_lines(rows)),
    ".ndjson.gz": lambda rows: gzip.compress(as_json_lines(rows)),
    ".json.gz": lambda rows: gzip.compress(as_json_lines(rows)),
}


def written(folder: Path, suffix: str, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    path = folder / f"documents{suffix}"
    path.write_bytes(WRITERS[suffix](rows))
    return path


def raw(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def content(documents: Documents) -> tuple[Any, ...]:
    return (
        documents.texts,
        documents.codes.tolist(),
        documents.units.tolist(),
        documents.problems,
        documents.undeclared,
    )


def error_of(path: Path, unit: str = "record", **documents: Any) -> str:
    """The sentence of the DataError, after looking for cells in everything that a traceback would print."""
    with pytest.raises(DataError) as caught:
        Documents.load(site(path, **documents), study(unit))
    printed = "".join(traceback.format_exception(caught.value))
    assert SECRET not in printed
    assert str(path) in printed
    return str(caught.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_accepted_format_gives_the_same_documents(tmp_path: Path, suffix: str) -> None:
    documents = Documents.load(site(written(tmp_path, suffix)), study("patient"))
    assert documents.texts == ("Kind nurses.", 'Cold food,\n"again"', "Grüße")
    assert documents.codes.tolist() == [1, 2, 0]
    assert documents.units.tolist() == [0, 1, 0]
    assert documents.codes.dtype == documents.units.dtype == np.int32
    assert documents.undeclared == 1
    assert documents.problems == (
        RowProblem(5, Problem.NO_TEXT),
        RowProblem(6, Problem.NO_CODE),
        RowProblem(7, Problem.NO_PATIENT),
    )


def test_every_accepted_format_is_tested() -> None:
    assert set(WRITERS) == set(SUFFIXES)


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "text": CELLS,
                "topic": st.sampled_from(["Staff", "Food", "Other", "", "NA", "null"]),
                "stars": st.sampled_from([1, 4, 5]),
                "patient": CELLS,
                "ignored": CELLS,
            }
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["record", "patient"]),
)
def test_same_rows_give_the_same_documents_in_every_format(
    tmp_path: Path, rows: list[dict[str, Any]], unit: str
) -> None:
    loaded = [
        content(Documents.load(site(written(tmp_path, suffix, rows)), study(unit)))
        for suffix in (".parquet", ".csv", ".jsonl")
    ]
    assert loaded[0] == loaded[1] == loaded[2]
    assert len(loaded[0][0]) + len(loaded[0][3]) + loaded[0][4] == len(rows)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize(
    ("cell", "value"),
    [(4, 4), (4.0, 4), ("4", 4), (" 4 ", "4"), (True, "true"), (False, "false"), (4.5, "4.5")],
)
def test_values_of_any_type_find_their_code(tmp_path: Path, suffix: str, cell: Any, value: Any) -> None:
    rows = [{"text": "A text", "topic": "Food", "stars": cell}]
    documents = Documents.load(site(written(tmp_path, suffix, rows)), study(stars=["other", value]))
    assert documents.codes.tolist() == [3]


def test_csv_value_that_is_declared_as_it_stands_is_not_retyped(tmp_path: Path) -> None:
    path = raw(tmp_path, "d.csv", b"text,topic,stars\nA,Food,4.0\nB,Food,4\nC,Food,007\n")
    documents = Documents.load(site(path), study(stars=["4", "4.0", "007"]))
    assert documents.codes.tolist() == [4, 3, 5]


def test_two_spellings_of_one_patient_in_a_csv_are_one_unit(tmp_path: Path) -> None:
    path = raw(tmp_path, "d.csv", b"text,topic,stars,patient\nA,Food,4,12\nB,Food,4,12.0\nC,Food,4, 12\n")
    assert Documents.load(site(path), study("patient")).units.tolist() == [0, 0, 0]


def test_types_may_mix_in_json_lines(tmp_path: Path) -> None:
    rows = [{"text": "A", "topic": "Food", "stars": s, "patient": p} for s, p in ((4, 1), ("4", "1"), (4.0, 1.0))]
    documents = Documents.load(site(written(tmp_path, ".jsonl", rows)), study("patient"))
    assert documents.codes.tolist() == [3, 3, 3]
    assert documents.units.tolist() == [0, 0, 0]


def test_json_text_that_looks_like_a_date_stays_as_it_is(tmp_path: Path) -> None:
    rows = [{"text": "2020-01-01", "topic": "Food", "stars": 4}]
    assert Documents.load(site(written(tmp_path, ".jsonl", rows)), study()).texts == ("2020-01-01",)


@pytest.mark.parametrize("word", ["NA", "null", "nan", "None", "N/A"])
def test_csv_words_that_look_like_nothing_are_texts(tmp_path: Path, word: str) -> None:
    path = raw(tmp_path, "d.csv", f"text,topic,stars\n{word},Food,4\n".encode())
    assert Documents.load(site(path), study()).texts == (word,)


def test_parquet_column_types_of_all_sorts_can_be_read(tmp_path: Path) -> None:
    columns = {
        "text": pa.array(["A", "B"], pa.large_string()),
        "topic": pa.array(["Food", "Staff"]).dictionary_encode(),
        "stars": pa.array([4, 1], pa.decimal128(12, 2)),
        "patient": pa.array([1, 10**15 + 1], pa.timestamp("ns")),
    }
    pq.write_table(pa.table(columns), tmp_path / "d.parquet")
    documents = Documents.load(site(tmp_path / "d.parquet"), study("patient"))
    assert (documents.codes.tolist(), documents.unit_count) == ([3, 0], 2)


SEVERAL: list[dict[str, Any]] = [
    {"text": "Both.", "topic": ["Food", "Staff"], "stars": 4, "patient": "a"},
    {"text": "One.", "topic": ["Staff"], "stars": 1, "patient": "b"},
    {"text": "One is none of ours.", "topic": ["Parking", " Food "], "stars": 1, "patient": "a"},
    {"text": "None is.", "topic": ["Parking", "Noise"], "stars": 1, "patient": "b"},
    {"text": "Nothing there.", "topic": [], "stars": 1, "patient": "b"},
    {"text": "Nor here.", "topic": ["", None], "stars": 1, "patient": "b"},
    {"text": "All three.", "topic": ["Staff", "Ward", "Food"], "stars": 4, "patient": "c"},
]


def several(codes_per_unit: int = 2, unit: str = "record") -> Study:
    plain = study(unit).model_dump(mode="json")
    plain["codes"]["attributes"][0] |= {"values": ["Staff", "Food", "Ward"], "multiple": True}
    plain["privacy"]["codes_per_unit"] = codes_per_unit
    return Study.model_validate(plain)


def separated(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(row) | {"topic": "|".join(part or "" for part in row["topic"])} for row in rows]


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_a_document_of_several_values_stands_under_each(tmp_path: Path, suffix: str) -> None:
    rows = separated(SEVERAL) if suffix == ".csv" else SEVERAL
    documents = Documents.load(site(written(tmp_path, suffix, rows), value_separator="|"), several())
    # Staff is 0 and 1, Food 2 and 3, Ward 4 and 5; the third code of the last is one too many.
    assert documents.codes.tolist() == [3, 1, 0, 2, 1, 5]
    assert documents.units.tolist() == [0, 0, 1, 2, 3, 3]
    assert documents.texts == ("Both.", "Both.", "One.", "One is none of ours.", "All three.", "All three.")
    assert (documents.undeclared, documents.further_codes) == (1, 2)
    assert [(p.row, p.reason) for p in documents.problems] == [(5, Problem.NO_CODE), (6, Problem.NO_CODE)]
    assert documents.report().startswith("4 documents of 4 units can be used\n2 times one counts under a further code")


def test_several_codes_of_a_patient_are_of_one_unit(tmp_path: Path) -> None:
    documents = Documents.load(site(written(tmp_path, ".jsonl", SEVERAL)), several(3, "patient"))
    assert documents.units.tolist() == [0, 0, 1, 0, 2, 2, 2]
    assert documents.codes.tolist() == [3, 1, 0, 2, 1, 5, 3]


def test_values_that_a_table_respelled_are_found_one_by_one(tmp_path: Path) -> None:
    plain = several().model_dump(mode="json")
    plain["codes"]["attributes"][0]["values"] = ["1", "2", "true"]
    rows = b"text,topic,stars\nA,2.0;True,4\nB,1,1.0\n"
    documents = Documents.load(site(raw(tmp_path, "d.csv", rows), value_separator=";"), Study.model_validate(plain))
    assert documents.codes.tolist() == [3, 5, 0]


def test_without_a_separator_a_cell_is_one_value(tmp_path: Path) -> None:
    documents = Documents.load(site(written(tmp_path, ".csv", separated(SEVERAL))), several())
    assert documents.texts == ("One.",)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_list_where_one_value_is_due_is_malformed(tmp_path: Path, suffix: str) -> None:
    documents = Documents.load(site(written(tmp_path, suffix, SEVERAL)), study())
    assert {p.reason for p in documents.problems} == {Problem.NOT_ONE_VALUE}
    assert len(documents.problems) == len(SEVERAL)


def test_lists_in_lists_and_bad_text_in_lists_are_malformed(tmp_path: Path) -> None:
    lines = [
        b'{"text": "A", "topic": [["Staff"], "Food"], "stars": 4}',
        b'{"text": "B", "topic": {"Staff": 1}, "stars": 4}',
        b'{"text": "C", "topic": ["Staff", "\\ud800"], "stars": 4}',
    ]
    documents = Documents.load(site(raw(tmp_path, "d.jsonl", b"\n".join(lines))), several())
    assert [p.reason for p in documents.problems] == [
        Problem.NOT_ONE_VALUE,
        Problem.NOT_ONE_VALUE,
        Problem.NOT_UTF8,
    ]


def test_parquet_lists_of_all_sorts_can_be_read(tmp_path: Path) -> None:
    topics = [["Food", "Staff"], None, [], ["Ward"]]
    for number, kind in enumerate([pa.list_(pa.string()), pa.large_list(pa.large_string()), pa.list_(pa.binary())]):
        columns = {"text": pa.array(list("ABCD")), "topic": pa.array(topics, kind), "stars": pa.array([4] * 4)}
        # In several row groups, and from a slice: a list's place in its column isn't its row's.
        pq.write_table(pa.table(columns).slice(0, 4), tmp_path / f"{number}.parquet", row_group_size=2)
        documents = Documents.load(site(tmp_path / f"{number}.parquet"), several())
        assert documents.codes.tolist() == [3, 1, 5]


def test_undeclared_value_is_counted_not_listed(tmp_path: Path) -> None:
    rows = [{"text": SECRET, "topic": "Food", "stars": 9}, {"text": "A", "topic": "Food", "stars": 4}]
    documents = Documents.load(site(written(tmp_path, ".jsonl", rows)), study())
    assert (documents.undeclared, documents.problems, documents.texts) == (1, (), ("A",))


def test_patient_of_undeclared_rows_only_is_no_unit(tmp_path: Path) -> None:
    documents = Documents.load(site(written(tmp_path, ".csv")), study("patient"))
    assert documents.unit_count == 2


def test_repr_shows_sizes_only(tmp_path: Path) -> None:
    rows = [{"text": SECRET, "topic": "Food", "stars": 4, "patient": SECRET}]
    documents = Documents.load(site(written(tmp_path, ".parquet", rows)), study("patient"))
    assert SECRET in documents.texts
    for shown in (repr(documents), str(documents), f"{documents}", repr([documents])):
        assert SECRET not in shown
        assert "1 private documents of 1 units" in shown


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=20))
def test_documents_of_a_unit_are_found_by_order_and_offsets(drawn: list[int]) -> None:
    numbering = {unit: number for number, unit in enumerate(dict.fromkeys(drawn))}
    units = np.array([numbering[unit] for unit in drawn], dtype=np.int32)
    documents = Documents(tuple(map(str, drawn)), np.zeros(len(drawn), dtype=np.int32), units)
    order, offsets = documents.by_unit()
    assert offsets.size == documents.unit_count + 1 == len(numbering) + 1
    for unit in range(documents.unit_count):
        assert order[offsets[unit] : offsets[unit + 1]].tolist() == np.flatnonzero(units == unit).tolist()


def test_texts_codes_and_units_must_have_one_length() -> None:
    with pytest.raises(DataError, match="one code and one unit per text"):
        Documents(("a",), np.zeros(2, dtype=np.int32), np.zeros(1, dtype=np.int32))


def test_no_usable_document_is_not_an_error_of_load(tmp_path: Path) -> None:
    rows = [{"text": "A", "topic": "Elsewhere", "stars": 4}]
    documents = Documents.load(site(written(tmp_path, ".csv", rows)), study())
    assert (len(documents), documents.unit_count, documents.undeclared) == (0, 0, 1)
    assert [part.tolist() for part in documents.by_unit()] == [[], [0]]


def test_json_lines_that_are_malformed_are_named_and_the_others_kept(tmp_path: Path) -> None:
    good = '{"text": "A", "topic": "Food", "stars": 4}'
    lines = [
        good.encode(),
        b"",
        f'{{"text": "{SECRET}", '.encode(),
        b'["a list"]',
        b'{"text": "\xff", "topic": "Food", "stars": 4}',
        b'{"text": "\\ud800", "topic": "Food", "stars": 4}',
        b'{"text": ["a", "list"], "topic": "Food", "stars": 4}',
        b'{"text": "one", "text": "two", "topic": "Food", "stars": 4}',
        b"[" * 100_000,
        b'{"topic": "Food", "stars": NaN}',
        good.encode(),
    ]
    documents = Documents.load(site(raw(tmp_path, "d.jsonl", b"\r\n".join(lines))), study())
    assert documents.texts == ("A", "A")
    assert [(p.row, p.reason) for p in documents.problems] == [
        (2, Problem.NOT_JSON),
        (3, Problem.NOT_JSON),
        (4, Problem.NOT_UTF8),
        (5, Problem.NOT_UTF8),
        (6, Problem.NOT_ONE_VALUE),
        (7, Problem.REPEATED_KEY),
        (8, Problem.NOT_JSON),
        (9, Problem.NO_TEXT),
    ]


def test_csv_rows_with_other_cells_than_the_header_are_named(tmp_path: Path) -> None:
    lines = [
        "text,topic,stars",
        "short",
        "",
        '"two\nlines",Food,4',
        "A,Food,4,more",
        "B,Food,4",
        "C,Food",
        "D,Food,4",
    ]
    lines += ["E,Food,4", "F"] * 20
    documents = Documents.load(site(raw(tmp_path, "d.csv", "\r\n".join(lines).encode())), study())
    assert documents.texts == ("two\nlines", "B", "D", *["E"] * 20)
    assert {p.reason for p in documents.problems} == {Problem.WRONG_CELLS}
    assert [p.row for p in documents.problems] == [1, 3, 5, *range(8, 47, 2)]


def test_csv_with_malformed_rows_only_has_no_documents(tmp_path: Path) -> None:
    documents = Documents.load(site(raw(tmp_path, "d.csv", b"text,topic,stars\na\nb\n")), study())
    assert (len(documents), [p.row for p in documents.problems]) == (0, [1, 2])


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n\r\n"])
def test_csv_with_a_header_only_has_no_documents(tmp_path: Path, end: bytes) -> None:
    assert len(Documents.load(site(raw(tmp_path, "d.csv", b"text,topic,stars" + end)), study())) == 0


def test_cells_that_are_not_utf8_are_named_by_row(tmp_path: Path) -> None:
    path = raw(tmp_path, "d.csv", b"text,topic,stars\nA,Food,4\nM\xfcller,Food,4\nB,Food,4\n")
    documents = Documents.load(site(path), study())
    assert (documents.texts, documents.problems) == (("A", "B"), (RowProblem(2, Problem.NOT_UTF8),))
    bad = pa.array([b"A", b"M\xfcller", b"B"]).view(pa.string())
    table = pa.table({"text": bad, "topic": ["Food"] * 3, "stars": [4] * 3})
    pq.write_table(table, tmp_path / "d.parquet")
    assert content(Documents.load(site(tmp_path / "d.parquet"), study())) == content(documents)


@pytest.mark.parametrize("name", ["d.csv", "d.jsonl"])
def test_byte_order_mark_is_no_part_of_a_name(tmp_path: Path, name: str) -> None:
    data = WRITERS[Path(name).suffix]([{"text": "A", "topic": "Food", "stars": 4}])
    assert Documents.load(site(raw(tmp_path, name, b"\xef\xbb\xbf" + data)), study()).texts == ("A",)


def test_columns_that_are_not_needed_may_hold_anything(tmp_path: Path) -> None:
    lines = [b"x,text,topic,x,stars,blob", b"1,A,Food,1,4,\xff", b"one,B,Food,,4,"]
    documents = Documents.load(site(raw(tmp_path, "d.csv", b"\n".join(lines))), study())
    assert documents.texts == ("A", "B")


def test_names_of_columns_come_from_the_site_file(tmp_path: Path) -> None:
    rows = [{"note": "A", "Thema": "Food", "n.stars": 4}]
    for suffix in (".csv", ".jsonl", ".parquet"):
        options = site(
            written(tmp_path, suffix, rows),
            text_column="note",
            code_columns={"topic": "Thema", "stars": "n.stars"},
        )
        assert Documents.load(options, study()).codes.tolist() == [3]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_stop_names_the_first_malformed_row_and_how_many_there_are(tmp_path: Path, suffix: str) -> None:
    rows = [*ROWS, {"text": SECRET, "topic": "", "stars": 1, "patient": "x"}]
    sentence = error_of(written(tmp_path, suffix, rows), on_malformed="stop")
    assert "row 5 can't be used: the text is empty; 3 such rows in all" in sentence


def test_stop_does_not_stop_at_undeclared_values(tmp_path: Path) -> None:
    path = written(tmp_path, ".csv", ROWS[:4])
    assert Documents.load(site(path, on_malformed="stop"), study()).undeclared == 1


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("options", "column", "fix"),
    [
        ({"text_column": "note"}, "note", "documents.text_column"),
        ({"code_columns": {"topic": "theme"}}, "theme", "documents.code_columns"),
        ({"patient_column": "person"}, "person", "documents.patient_column"),
    ],
)
def test_missing_column_names_the_file_what_is_there_and_the_fix(
    tmp_path: Path, suffix: str, options: dict[str, Any], column: str, fix: str
) -> None:
    sentence = error_of(written(tmp_path, suffix), "patient", **options)
    assert f"column {column!r} is missing; the file has 'text', 'topic', 'stars', 'patient'; name" in sentence
    assert sentence.endswith(fix)


def test_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    assert "'text' is there 2 times" in error_of(raw(tmp_path, "d.csv", b"text,topic,stars,text\nA,Food,4,B\n"))
    table = pa.table([["A"], ["B"], ["Food"], [4]], names=["text", "text", "topic", "stars"])
    pq.write_table(table, tmp_path / "d.parquet")
    assert "'text' is there 2 times" in error_of(tmp_path / "d.parquet")


def test_patient_study_without_a_patient_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"documents\.patient_column must name"):
        Documents.load(site(written(tmp_path, ".csv"), patient_column=None), study("patient"))
    assert len(Documents.load(site(written(tmp_path, ".csv"), patient_column=None), study("record"))) == 4


HEADER = b"text,topic,stars\n"
ROW = SECRET.encode() + b",Food,4\n"


@pytest.mark.parametrize(
    ("name", "data", "part"),
    [
        ("d.csv", b"", "the file is empty"),
        ("d.csv.gz", gzip.compress(b""), "the file is empty"),
        ("d.csv", b"\n\n", "the file is empty"),
        ("d.jsonl", b" \n \n", "the file is empty"),
        ("d.xlsx", b"x", "'.xlsx' isn't a known kind of file; .parquet, .csv, .jsonl"),
        ("d.parquet.gz", b"x", "isn't a known kind of file"),
        ("d", b"x", "isn't a known kind of file"),
        ("d.csv", HEADER.replace(b",", b";") + ROW, "separated by ';'; a comma is needed"),
        ("d.csv", b"\xff\xfe" + (HEADER + ROW).decode().encode("utf-16-le"), "isn't UTF-8"),
        ("d.csv", HEADER + b'A,Food,"4\n' + ROW * 3, "a quote isn't closed"),
        ("d.csv.gz", HEADER + ROW, "can't be read as .csv"),
        ("d.csv.gz", gzip.compress(HEADER + ROW * 9999)[:-20], "can't be read as .csv"),
        ("d.jsonl.gz", gzip.compress(as_json_lines(ROWS) * 999)[:-20], "can't be read as .jsonl"),
        ("d.jsonl.gz", gzip.compress(as_json_lines(ROWS))[:20] + b"\xff" * 50, "can't be read as .jsonl"),
        ("d.parquet", HEADER + ROW, "can't be read as .parquet"),
        ("d.parquet", as_parquet(ROWS)[:-30], "can't be read as .parquet"),
        (
            "d.parquet",
            as_parquet(ROWS)[:20] + b"\xff" * 200 + as_parquet(ROWS)[220:],
            "can't be read as .parquet",
        ),
        ("d.json", json.dumps([{"text": SECRET}], indent=1).encode(), "without an array around them"),
        ("d.jsonl", HEADER + ROW, "no line is a JSON object"),
    ],
)
def test_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, name: str, data: bytes, part: str) -> None:
    assert part in error_of(raw(tmp_path, name, data))


def test_long_csv_cell_is_read_and_an_endless_one_refused(tmp_path: Path) -> None:
    path = raw(tmp_path, "d.csv", HEADER + b"x" * 200_000 + b",Food,4\n")
    assert [len(text) for text in Documents.load(site(path), study()).texts] == [200_000]
    assert "a quote isn't closed" in error_of(raw(tmp_path, "d.csv", HEADER + b'"' + ROW * 10))


def test_csv_row_with_a_bad_quote_is_named_and_the_next_one_kept(tmp_path: Path) -> None:
    path = raw(tmp_path, "d.csv", HEADER + b'"A" or B,Food,4\n5" nail,Food,4\nC,Food,4\n')
    documents = Documents.load(site(path), study())
    assert documents.texts == ('5" nail', "C")
    assert documents.problems == (RowProblem(1, Problem.BAD_QUOTE),)


def test_malformed_csv_row_that_is_not_utf8_keeps_its_number(tmp_path: Path) -> None:
    path = raw(tmp_path, "d.csv", HEADER + b"\xff\nA,Food,4\n\xfe,Food,4,\xfd\nB,\xfc,4\n")
    documents = Documents.load(site(path), study())
    assert [(p.row, p.reason) for p in documents.problems] == [
        (1, Problem.WRONG_CELLS),
        (3, Problem.WRONG_CELLS),
        (4, Problem.NOT_UTF8),
    ]


def test_quote_at_the_end_that_is_closed_is_no_error(tmp_path: Path) -> None:
    path = raw(tmp_path, "d.csv", b'topic,stars,text\nFood,4,"two\nlines\n"\r\n')
    assert Documents.load(site(path), study()).texts == ("two\nlines",)


def test_missing_file_and_folder_are_told_apart(tmp_path: Path) -> None:
    assert "no such file" in error_of(tmp_path / "none.csv")
    (tmp_path / "folder.csv").mkdir()
    assert "is a folder" in error_of(tmp_path / "folder.csv")


def test_file_that_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, ".csv")

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", SECRET)

    monkeypatch.setattr(module, "_opened", forbidden)
    assert "can't be read: permission denied" in error_of(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=120), st.sampled_from(SUFFIXES), st.booleans())
def test_any_bytes_give_documents_or_a_data_error(tmp_path: Path, data: bytes, suffix: str, headed: bool) -> None:
    data = HEADER + data if headed else data
    path = raw(tmp_path, f"d{suffix}", gzip.compress(data) if suffix.endswith(".gz") else data)
    with contextlib.suppress(DataError):
        assert Documents.load(site(path), study()).codes.dtype == np.int32


def test_the_operators_report_names_rows_and_reasons_and_no_content(tmp_path: Path) -> None:
    rows = [*ROWS, *({"text": "", "topic": SECRET, "stars": 1, "patient": SECRET} for _ in range(30))]
    report = Documents.load(site(written(tmp_path, ".parquet", rows)), study()).report()
    assert "row 5: the text is empty" in report
    assert "and 12 more" in report
    assert "1 rows have values that the study doesn't declare" in report
    assert SECRET not in report


def test_progress_counts_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_ROWS", 3)
    seen: list[int] = []
    Documents.load(site(written(tmp_path, ".parquet")), study(), progress=seen.append)
    assert seen == [3, 6, 7]


def test_batches_do_not_change_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, ".parquet", ROWS * 4)
    whole = content(Documents.load(site(path), study("patient")))
    monkeypatch.setattr(module, "BATCH_ROWS", 3)
    assert content(Documents.load(site(path), study("patient"))) == whole


def test_as_text_has_one_spelling_for_one_value() -> None:
    cells = (4, 4.0, " 4", True, None, float("nan"), float("inf"), 1e20, -2.5)
    assert [as_text(cell) for cell in cells] == [
        "4",
        "4",
        "4",
        "true",
        "",
        "",
        "inf",
        "100000000000000000000",
        "-2.5",
    ]


def test_read_columns_gives_texts_of_readable_rows(tmp_path: Path) -> None:
    path = raw(tmp_path, "d.csv", b"text,stars,x\nA, 4 ,1\nshort\nB,,1\n")
    assert read_columns(path, ["stars", "text"]) == [{"stars": "4", "text": "A"}, {"stars": "", "text": "B"}]
    with pytest.raises(DataError, match="column 'topic' is missing; the file has 'text', 'stars', 'x'; name one"):
        read_columns(path, ["topic"])


def test_real_patient_feedback_is_the_same_in_every_format(tmp_path: Path) -> None:
    """Real comments where they lie beside the project; a small stand-in of the same shape elsewhere."""
    rows = _feedback()
    topics = list(dict.fromkeys(row["label"] for row in rows))
    plan = Study.model_validate(
        study().model_dump() | {"codes": {"attributes": [{"name": "label", "values": topics[:-1]}]}}
    )
    loaded = [
        Documents.load(site(written(tmp_path, suffix, rows), patient_column="hospital"), plan)
        for suffix in (".parquet", ".csv.gz", ".jsonl")
    ]
    assert content(loaded[0]) == content(loaded[1]) == content(loaded[2])
    assert loaded[0].undeclared == sum(row["label"] == topics[-1] for row in rows) > 0
    assert len(loaded[0]) + loaded[0].undeclared == len(rows)
    assert loaded[0].problems == ()


def _feedback() -> list[dict[str, str]]:
    if not PUBLIC_TEXT.is_file():
        topics = ("Staff", "Care", "Food")
        return [{"text": f"Comment {i}, “fine”", "label": topics[i % 3], "hospital": "A"} for i in range(30)]
    with gzip.open(PUBLIC_TEXT, "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    return [{key: str(row[key]) for key in ("text", "label", "hospital")} for row in rows]
