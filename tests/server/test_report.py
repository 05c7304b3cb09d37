"""Summaries: readable, exact, and no text in them can act as markup."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from server.report import render_summary, to_markdown, write_summary
from server.strategies.aggregation import RoundReport, SiteUpdate
from server.summary import CodeSummary, Sample, SiteSummary, Summary, read_summary
from server.workspace import Workspace, replace_folder

HOSTILE = "[bold red]x[/] <script>|`\x1b[2J"


def _summary(codes: int = 2) -> Summary:
    return Summary(
        run_id="r", study="s", study_sha256="0" * 64, attributes=("topic",), unit="record",
        epsilon=7.99, delta=1e-4, votes_per_unit=3,
        selection="simplex", pool_size=10, corpus_size=5 * codes, dropped={}, seconds={"census": 1.0},
        sites=(
            SiteSummary(name="north", tier="strong", size_class=100, answers=3, outcome="answered", epsilon=7.99,
                        delta=1e-4),
            SiteSummary(name="west", tier="weak", size_class=100, answers=0, outcome="no answer in time", epsilon=7.9,
                        delta=1e-4),
        ),
        codes=tuple(
            CodeSummary(
                label=f"topic={i}", values=(f"t{i}",), profile=10 + i, wanted=5, candidates=6, votes=4, chosen=3,
                fresh=2, repeated=0, made=5,
            )
            for i in range(codes)
        ),
        rounds=(
            RoundReport(round=1, signal_to_noise=0.5, shared=None,
                        updates=(SiteUpdate(site="north", norm=1.5, cosine=None),)),
            RoundReport(round=2, signal_to_noise=0.5, shared=0.031,
                        updates=(SiteUpdate(site="north", norm=1.5, cosine=0.2),
                                 SiteUpdate(site="south", norm=2.5, cosine=0.2))),
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


def test_rounds_are_shown_with_every_sites_change_and_the_first_of_many_are_left_out() -> None:
    shown = _shown(_summary())
    assert "3.1%" in shown
    assert "north 1.5 (+0.20), south 2.5 (+0.20)" in shown
    assert "| 2 | ≤ 0.5 | 3.1% | north 1.5 (+0.20), south 2.5 (+0.20) |" in to_markdown(_summary())
    many = tuple(_summary().rounds[1].model_copy(update={"round": n}) for n in range(1, 31))
    shown = _shown(_summary().model_copy(update={"rounds": many}))
    assert "1-20" in shown
    assert shown.count("south 2.5") == 10
    assert "Training rounds" not in _shown(_summary().model_copy(update={"rounds": ()}))


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


@pytest.mark.parametrize("width", [80, 120])
def test_long_names_are_folded_and_none_is_cut_off(width: int) -> None:
    name, outcome = "st-elsewhere-university-hospital-trust", "refused: BUDGET_EXCEEDED"
    site = SiteSummary(name=name, tier="weak", size_class=100_000, answers=0, outcome=outcome, epsilon=None, delta=None)
    shown = _shown(_summary().model_copy(update={"sites": (site,)}), width)
    squeezed = "".join(shown.split())
    assert "…" not in shown
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    assert "BUDGET_EXCEEDED" in squeezed
    assert name.startswith("st-elsewhere-univ")
    assert "st-elsewhere-univ" in squeezed


@pytest.mark.parametrize(
    ("epsilon", "said"), [(7.99, "7.990"), (8.0, "8.000"), (8.0041, "8.005"), (0.00001, "0.001"), (float("inf"), "∞")]
)
def test_a_promise_is_never_rounded_to_look_better(epsilon: float, said: str) -> None:
    site = SiteSummary(name="n", tier="weak", size_class=1, answers=1, outcome="answered", epsilon=epsilon, delta=1e-4)
    summary = _summary().model_copy(update={"epsilon": epsilon, "sites": (site,)})
    for page in (_shown(summary), to_markdown(summary)):
        assert f"(ε={said}, δ=0.0001)" in page
        assert page.count(said) == 2


def test_a_very_long_text_does_not_bury_the_table() -> None:
    summary = _summary().model_copy(update={"samples": (Sample(label="topic=0", text="word " * 4000),)})
    assert len(_shown(summary).splitlines()) < 50
    assert len(to_markdown(summary)) < 5000


@pytest.mark.parametrize("hostile", [HOSTILE, "\x07\x9b31m", "a\nb\n# c", "\u202egnp", "`", "[link=file:///x]y[/link]"])
def test_no_name_value_or_warning_acts_as_markup(hostile: str) -> None:
    code = _summary().codes[0].model_copy(update={"values": (hostile,), "label": hostile})
    site = _summary().sites[0].model_copy(update={"name": hostile, "outcome": hostile})
    update = _summary().rounds[0].updates[0].model_copy(update={"site": hostile})
    summary = _summary().model_copy(
        update={
            "rounds": (_summary().rounds[0].model_copy(update={"updates": (update,)}),),
            "attributes": (hostile,), "codes": (code,), "sites": (site,), "warnings": (hostile,), "study": hostile,
            "files": {"corpus": hostile}, "samples": (Sample(label=hostile, text=hostile),),
        }
    )  # fmt: skip
    out = io.StringIO()
    render_summary(summary, Console(file=out, width=120, force_terminal=True, color_system=None))
    page = to_markdown(summary)
    for text in (out.getvalue(), page):
        assert not set(text) & set("\x07\x9b\u202e")
        assert "\x1b[2J" not in text
        assert "\x1b]8" not in text, "no hyperlink"
    assert page.count("\n# ") == 0
    assert sum(line.startswith("#") for line in page.splitlines()) == 7
    assert page.count("`") % 2 == 0 or "\\`" in page


def test_the_page_names_what_was_wanted_made_dropped_and_run_with() -> None:
    summary = _summary(codes=50).model_copy(update={"dropped": {"duplicate": 41}, "software": {"flwr": "1.42.0"}})
    page = to_markdown(summary)
    for words in (
        "250 of 250 texts under 50 control codes; 1 of 2 sites answered",
        "150 texts were chosen from 10 candidates (rule simplex, 3 votes a record), 100 were generated",
        "duplicate 41",
        "flwr 1.42.0",
        "| 30 more codes | 1335 | 120 | 180 | 150 | 150 | 90 | 60 | 0 |",
        "| **all** | 1725 | 200 | 300 | 250 | 250 | 150 | 100 | 0 |",
        "west: lost",
    ):
        assert words in page
    assert "votes had no say" in to_markdown(summary.model_copy(update={"selection": "uniform"}))


def test_the_summary_reads_back_the_same(tmp_path: Path) -> None:
    write_summary(Workspace(tmp_path), _summary())
    assert read_summary(Workspace(tmp_path)) == _summary()
    assert (tmp_path / "SUMMARY.md").read_text(encoding="utf-8") == to_markdown(_summary())


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
