"""``fedcorpus site audit``: what an operator sees, in which formats, and with which exit code."""

from __future__ import annotations

import gzip
import json
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from server import cli, site_commands
from tests.common.site.audit.notes import notes
from tests.hospitals import small_study, write_site, write_study

DOCUMENTS, OTHERS = notes(60, seed=1), notes(40, seed=3)

Audit = Callable[..., tuple[int, str, str]]


@pytest.fixture
def audit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Audit:
    """Runs the command in this process: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["fedcorpus", "site", "audit", *map(str, arguments)])
        monkeypatch.setattr("signal.signal", lambda *_: None)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Site file of a weak hospital with made-up notes."""
    return _site(tmp_path, DOCUMENTS)


def _site(folder: Path, documents: Sequence[str]) -> Path:
    rows = [
        {"text": text, "topic": "staff", "tone": 1, "patient": f"p{i}", "surname": f"Name{chr(65 + i % 26) * 4}"}
        for i, text in enumerate(documents)
    ]
    return write_site(folder, "north", "weak", rows)


def _corpus(folder: Path, texts: Sequence[str], name: str = "corpus.parquet") -> Path:
    file = folder / name
    pq.write_table(pa.table({"text": list(texts)}), file)
    return file


def test_a_clean_corpus_ends_with_zero_and_a_copied_one_with_one(tmp_path: Path, site: Path, audit: Audit) -> None:
    code, out, _ = audit(_corpus(tmp_path, OTHERS), "--site", site)
    assert code == 0, out
    assert "No limit ([leak_check] in site.toml) is passed." in out
    code, out, err = audit(_corpus(tmp_path, [*OTHERS, DOCUMENTS[5]]), "--site", site)
    assert code == 1
    assert "LOOK: 1 text shares a run of 100 characters or more" in out
    assert "row 41" in out
    assert "don't send it to the coordinator" in out
    assert err == ""


def test_every_measure_is_said_beside_what_to_expect(tmp_path: Path, site: Path, audit: Audit) -> None:
    holdout = _corpus(tmp_path, notes(40, seed=2), "holdout.parquet")
    code, out, _ = audit(_corpus(tmp_path, OTHERS), "--site", site, "--holdout", holdout)
    assert code == 0, out
    for measure in ("longest run", "suspects", "5 words", "8 words", "- like for like", "distance", "nearer"):
        assert f"\n {measure} " in out
        assert f"\n{measure}: " in out
    assert "40 held-out documents" in out


def test_json_has_every_number_and_no_text(tmp_path: Path, site: Path, audit: Audit) -> None:
    corpus = _corpus(tmp_path, [*OTHERS, DOCUMENTS[5]])
    code, out, _ = audit(corpus, "--site", site, "--json")
    found = json.loads(out)
    assert code == 1
    assert (found["texts"], found["documents"], found["units"]) == (41, 60, 60)
    assert [suspect["row"] for suspect in found["runs"]["suspects"]] == [41]
    assert len(found["findings"]) == 1
    assert found["limits"]["shared_characters"] == 100
    assert not any(part.casefold() in out.casefold() for part in DOCUMENTS[5].split(". "))


def test_shared_text_is_printed_on_a_terminal_or_on_request_only(
    tmp_path: Path, site: Path, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, run = _corpus(tmp_path, [*OTHERS, DOCUMENTS[5]]), DOCUMENTS[5].casefold()[:60]
    assert run not in audit(corpus, "--site", site)[1]
    assert run in audit(corpus, "--site", site, "--texts")[1]
    monkeypatch.setattr(site_commands, "screen", Console(force_terminal=True, width=100))
    assert run in audit(corpus, "--site", site)[1]
    assert run not in audit(corpus, "--site", site, "--no-texts")[1]


def test_nothing_in_a_text_has_an_effect_on_the_terminal(
    tmp_path: Path, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = f"\x1b]0;title\x07\x1b[2J [bold red]markup[/] :smile: \u202eabc\u2066 \u200b\x9b31m {DOCUMENTS[0]}"
    monkeypatch.setattr(site_commands, "screen", Console(force_terminal=True, width=100))
    code, out, _ = audit(_corpus(tmp_path, [*OTHERS, hostile]), "--site", _site(tmp_path, [*DOCUMENTS, hostile]))
    assert code == 1
    assert "[bold red]markup[/] :smile:" in out
    for effect in ("\x1b]", "\x1b[2J", "\x07", "\u202e", "\u2066", "\u200b", "\x9b"):
        assert effect not in out


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz", "corpus.csv", "bundle", "bundle of lines"])
def test_all_kinds_of_corpus_are_read(tmp_path: Path, site: Path, audit: Audit, name: str) -> None:
    texts = [*OTHERS[:10], DOCUMENTS[5]]
    lines = "".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts)).encode()
    corpus = tmp_path / name
    if name == "bundle":
        (corpus / "data").mkdir(parents=True)
        for number, shard in enumerate((texts[:6], texts[6:])):
            _corpus(corpus / "data", shard, f"train-{number:05d}-of-00002.parquet")
    elif name == "bundle of lines":
        corpus.mkdir()
        (corpus / "data.jsonl.gz").write_bytes(gzip.compress(lines))
    elif name == "corpus.csv":
        corpus.write_text("text\n" + "".join(f'"{text}"\n' for text in texts), encoding="utf-8")
    else:
        corpus.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    code, out, _ = audit(corpus, "--site", site, "--json")
    assert code == 1
    assert [suspect["row"] for suspect in json.loads(out)["runs"]["suspects"]] == [11]


def test_the_result_is_written_on_request_for_its_owner_alone(tmp_path: Path, site: Path, audit: Audit) -> None:
    corpus, out = _corpus(tmp_path, OTHERS), tmp_path / "result.json"
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert audit(corpus, "--site", site)[0] == 0
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    assert audit(corpus, "--site", site, "--out", out)[0] == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert json.loads(out.read_text(encoding="utf-8"))["texts"] == 40
    code, _, err = audit(corpus, "--site", site, "--out", out)
    assert code == 2
    assert "exists already; name a new file" in err


def test_a_study_says_which_documents_count(tmp_path: Path, site: Path, audit: Audit) -> None:
    values = [{"name": "topic", "values": ["parking"]}, {"name": "tone", "values": [1, 2]}]
    study = write_study(tmp_path, small_study(tmp_path, codes={"attributes": values}))
    code, _, err = audit(_corpus(tmp_path, OTHERS), "--site", site, "--study", study)
    assert code == 2
    assert "no documents: study 'small' can use none of them" in err
    study = write_study(tmp_path, small_study(tmp_path))
    assert audit(_corpus(tmp_path, OTHERS), "--site", site, "--study", study)[0] == 0


def test_limits_and_identifier_columns_are_the_site_files(tmp_path: Path, site: Path, audit: Audit) -> None:
    corpus = _corpus(tmp_path, [f"{OTHERS[0]} NameBBBB, p31234", *OTHERS[1:], DOCUMENTS[5]])
    text = site.read_text(encoding="utf-8").replace("[policy]", 'identifier_columns = ["surname"]\n[policy]')
    site.write_text(text + "[leak_check]\nshared_characters = 5000\nwhole_characters = 5000\n", encoding="utf-8")
    code, out, _ = audit(corpus, "--site", site, "--json")
    assert code == 0, out
    [names] = [kind for kind in json.loads(out)["identifiers"] if kind["kind"].startswith("column")]
    assert (names["kind"], names["in_documents"], names["rows"]) == ("column 'surname', single words", 1, [1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: file.mkdir(), "no data/train-*.parquet in it; a corpus file or the folder of a bundle is needed"),
        (lambda file: file.write_bytes(b"secret"), "can't be read as .parquet"),
        (lambda file: None, "no such file"),
        (lambda file: pq.write_table(pa.table({"note": ["secret"]}), file), "column 'text' is missing"),
        (lambda file: pq.write_table(pa.table({"text": pa.array([], pa.string())}), file), "0 rows and no text"),
    ],
)
def test_an_unusable_corpus_is_one_sentence(
    tmp_path: Path, site: Path, audit: Audit, make: Callable[[Path], Any], message: str
) -> None:
    make(tmp_path / "corpus.parquet")
    code, out, err = audit(tmp_path / "corpus.parquet", "--site", site)
    assert (code, out) == (2, "")
    assert message in err
    assert "secret" not in err
    assert err.count("\n") == 1


def test_without_a_site_file_it_says_which_is_missing(
    tmp_path: Path, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = audit(_corpus(tmp_path, OTHERS))
    assert code == 2
    assert "site.toml: no such file" in err
