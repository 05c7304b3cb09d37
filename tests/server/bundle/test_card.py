"""The dataset card: titles, names and texts are data, in its YAML head and in its Markdown."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from common.study import Study
from server.bundle import card as card_module
from server.bundle import files
from server.bundle.card import card
from server.bundle.files import Facts
from server.statement import PrivacyStatement
from server.summary import Sample

HOSTILE = [
    "</code><script>alert(1)</script>", "`code` ``x`` ", "![image](http://a.example/x.png)", "[link](http://a.example)",
    "\n\n# Heading\n\n---\n", "| a | b |\n|---|---|\n| c | d |", "<!-- comment", "http://a.example and www.a.example",
    "\u202eright to left\u2066", "$x$ {{ x }} {% x %}", "me@a.example @someone :smile:", "\x00\x1b[31mred\x1b[0m",
    "- a\n- b\n1. c", "\\` \\\\", "&lt;b&gt; &#60;b&#62;",
]  # fmt: skip


def _card(bundle: Path, hostile: str) -> tuple[str, Facts]:
    """The card of a corpus with a hostile title, publisher, attribute name, value and texts."""
    title = "".join(c if c.isprintable() else " " for c in hostile).strip()
    study = json.loads((bundle / files.STUDY).read_text())
    study["codes"]["attributes"] = [{"name": f"topic {hostile}", "values": [f"a{hostile}z", "b"]}]
    codes = Study.model_validate(study).codes
    changes = {"title": title, "publisher": title, "columns": files.columns(codes), "missing": {codes.label(1): 1}}
    facts = Facts.model_validate(json.loads((bundle / files.FACTS).read_text()) | changes)
    statement = PrivacyStatement.model_validate_json((bundle / files.STATEMENT).read_bytes())
    samples = [Sample(label=codes.label(n), text=hostile) for n in (0, 1)]
    return card(facts, statement, Study.model_validate(study), [2, 2], samples), facts


def _structure(page: str) -> Counter[str]:
    """How many of each kind of Markdown element there are."""
    body = page.split("\n---\n", 1)[1]
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    return Counter(t.type for block in tokens for t in [block, *(block.children or [])] if t.type != "text_special")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_hostile_becomes_structure_of_the_card(bundle: Path, hostile: str) -> None:
    page, _ = _card(bundle, hostile)
    found, expected = _structure(page), _structure(_card(bundle, "plain")[0])
    # Text is cut into more or fewer pieces; nothing else may differ.
    for pieces in ("text", "softbreak"):
        found.pop(pieces, None)
        expected.pop(pieces, None)
    assert found == expected
    assert not {"html_block", "html_inline", "link_open", "image"} & found.keys()
    assert all(c.isprintable() or c == "\n" for c in page)


def test_twin_without_escaping_the_structure_breaks(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_module, "escaped", str)
    assert _structure(_card(bundle, "[link](http://a.example)")[0])["link_open"]


def test_a_sample_is_code_in_which_no_reader_makes_links(bundle: Path) -> None:
    page, _ = _card(bundle, "http://a.example")
    samples = page.split("## Samples")[1].split("## How")[0].strip().split("\n")
    assert len(samples) == 2
    assert all(line.endswith(": `http://a.example`") for line in samples)


@pytest.mark.parametrize("hostile", ["x: y", '"', "a\\", "- a # b", "*a &b !c", "\U0001f600 \u00e9", "'", "{[%", "yes"])
def test_the_head_gives_names_and_title_back_as_they_are(bundle: Path, hostile: str) -> None:
    page, facts = _card(bundle, hostile)
    head: dict[str, Any] = yaml.safe_load(page.split("---\n")[1])
    assert head["pretty_name"] == hostile == facts.title
    assert [feature["name"] for feature in head["dataset_info"]["features"]] == list(facts.columns)
    assert facts.columns[2] == f"topic {hostile}"
    assert head.keys() == {
        "pretty_name", "license", "language", "task_categories", "size_categories", "tags", "configs", "dataset_info",
    }  # fmt: skip


def test_the_card_says_what_is_promised_and_where_it_ends(bundle: Path) -> None:
    page = " ".join((bundle / "README.md").read_text(encoding="utf-8").split())
    statement = json.loads((bundle / "privacy_statement.json").read_text())
    assert f"(ε={statement['epsilon']:.3f}, δ=0.0001)" in page
    assert statement["assumption"] in page
    for said in (*statement["not_covered"], "Licence: CC-BY-4.0", "None of them reports what happened"):
        assert said in page
    assert "Study " + statement["study_sha256"][:16] in page


@pytest.mark.parametrize(
    ("texts", "size"), [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (99_999, "10K<n<100K"), (10**7, "n>1M")]
)
def test_sizes_have_the_hubs_names(texts: int, size: str) -> None:
    assert card_module._size(texts) == size
