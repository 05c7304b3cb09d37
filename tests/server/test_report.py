"""Summary and corpus files: readable, exact, and no text in them can act as markup."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console

from common.codes import ControlCodes
from server.corpus import CorpusText, read_corpus, write_corpus
from server.report import render_summary, to_markdown
from server.summary import CodeSummary, Sample, SiteSummary, Summary
from server.workspace import Workspace, replace_folder

CODES = ControlCodes.model_validate({"attributes": [{"name": "topic", "values": ["a", "b"]}]})
HOSTILE = "[bold red]x[/] <script>|`\x1b[2J"


def _summary(codes: int = 2) -> Summary:
    return Summary(
        run_id="r", study="s", study_sha256="0" * 64, attributes=("topic",), unit="record",
        epsilon=7.99, delta=1e-4, neighbours=3,
        selection="simplex", pool_size=10, corpus_size=5 * codes, dropped={}, seconds={"census": 1.0},
        sites=(
            SiteSummary(name="north", tier="strong", size_class=100, answers=3, outcome="answered", epsilon=7.99),
            SiteSummary(name="west", tier="weak", size_class=100, answers=0, outcome="no answer in time", epsilon=7.9),
        ),
        codes=tuple(
            CodeSummary(
                label=f"topic={i}", values=(f"t{i}",), profile=10 + i, wanted=5, candidates=6, votes=4, chosen=3,
                fresh=2, repeated=0, made=5,
            )
            for i in range(codes)
        ),
        samples=(Sample(label="topic=0", text=HOSTILE),), files={"corpus": "/x"}, software={}, warnings=("west: lost",),
    )  # fmt: skip


def _shown(summary: Summary, width: int = 80) -> str:
    out = io.StringIO()
    render_summary(summary, Console(file=out, width=width))
    return out.getvalue()


def test_the_table_fits_80_columns_and_names_what_is_missing() -> None:
    shown = _shown(_summary())
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines() if "/" not in line)
    for words in ("t1", "north", "7.990", "no answer in time", "west: lost", "for adding or removing one record"):
        assert words in " ".join(shown.split())


def test_a_synthetic_text_is_shown_as_it_is_without_effect() -> None:
    shown = _shown(_summary())
    assert "[bold red]x[/] <script>" in shown
    assert "\x1b" not in shown
    page = to_markdown(_summary())
    assert "<script>" not in page.replace("\\<", "")
    assert "\x1b" not in page


def test_many_codes_are_summed_up_and_nothing_is_lost() -> None:
    shown = _shown(_summary(codes=50))
    assert "and 30 more codes" in shown
    assert "150" in shown, "30 codes of 5 texts"


def test_the_corpus_reads_back_the_same_from_both_files(tmp_path: Path) -> None:
    texts = [CorpusText(t, i % 2, "candidate") for i, t in enumerate(["plain", "ü\u2028x", 'quo"te', "\ud800 lone"])]
    workspace = Workspace(tmp_path)
    write_corpus(workspace, CODES, texts)
    read = read_corpus(workspace, CODES)
    assert [t.text for t in read] == ["plain", "ü\u2028x", 'quo"te', "\ufffd lone"]
    table = pq.read_table(workspace.corpus_parquet)
    assert table.column_names == ["id", "text", "topic", "origin"]
    assert table["text"].to_pylist() == [t.text for t in read]
    lines = [json.loads(line) for line in workspace.corpus_jsonl.read_text().split("\n") if line]
    assert lines == table.to_pylist()


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    replace_folder(folder, lambda f: (f / "weights").write_text("1") and None)

    def fail(building: Path) -> None:
        (building / "weights").write_text("2")
        raise OSError

    try:
        replace_folder(folder, fail)
    except OSError:
        assert (folder / "weights").read_text() == "1"
    replace_folder(folder, lambda f: (f / "weights").write_text("3") and None)
    assert (folder / "weights").read_text() == "3"
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]
