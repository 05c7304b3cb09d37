"""Verification of a bundle: every change is named, whoever made it, and however it was sealed again."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.site.journal import chain_hash
from server.bundle import files
from server.bundle import verify as verify_module
from server.bundle.files import Facts
from server.bundle.signing import fingerprint
from server.bundle.verify import verify_bundle
from server.bundle.write import write_bundle
from server.verify import read_exports
from tests.server.bundle.finished import PUBLICATION, SITES, Finished, changed_run, problems_of
from tests.server.bundle.finished import seal as seal_again

Change = Callable[[Path], Any]


def _edit(folder: Path, name: str, **changes: Any) -> None:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | changes))


def test_an_honest_bundle_holds_with_ledgers_and_the_publishers_key(
    finished: Finished, bundle: Path, key: Ed25519PrivateKey
) -> None:
    verification = verify_bundle(bundle, read_exports([finished.ledgers]), key.public_key())
    assert verification.holds, verification.problems
    assert verification.signature == "trusted"
    assert verification.signing_key == fingerprint(key.public_key())
    assert {site.site: site.tier for site in verification.sites} == SITES
    claimed = {tier.tier: tier.claimed for tier in verification.tiers}
    for verdict in (*verification.sites, *verification.tiers):
        assert verdict.second == pytest.approx(claimed[verdict.tier], abs=0.002)
    assert verification.claimed_epsilon == max(claimed.values())
    assert (verification.title, verification.texts, verification.unit) == ("Comments", 20, "record")


def test_without_the_publishers_key_it_is_said_whose_signature_it_is(bundle: Path) -> None:
    verification = verify_bundle(bundle)
    assert verification.holds
    assert verification.signature == "own"
    assert not verification.sites


def test_an_unsigned_bundle_holds_but_not_as_the_publishers(
    finished: Finished, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    write_bundle(finished.run, tmp_path / "bundle", PUBLICATION, None)
    assert verify_bundle(tmp_path / "bundle").signature == "none"
    assert verify_bundle(tmp_path / "bundle").holds
    assert "it isn't signed" in problems_of(verify_bundle(tmp_path / "bundle", (), key.public_key()))


def _half_the_epsilon(folder: Path) -> None:
    _edit(folder, files.STATEMENT, epsilon=0.1)


def _less_is_uncovered(folder: Path) -> None:
    _edit(folder, files.STATEMENT, not_covered=[])


def _more_noise_is_claimed(folder: Path) -> None:
    statement = json.loads((folder / files.STATEMENT).read_text())
    statement["tiers"][0]["releases"][0]["mechanism"]["steps"] = 10**15
    _edit(folder, files.STATEMENT, tiers=statement["tiers"])


def _a_site_more(folder: Path) -> None:
    statement = json.loads((folder / files.STATEMENT).read_text())
    statement["tiers"][0]["sites"] += 1
    _edit(folder, files.STATEMENT, tiers=statement["tiers"])


def _another_study(folder: Path) -> None:
    study = json.loads((folder / files.STUDY).read_text())
    study["privacy"]["training_noise_multiplier"] = 20.0
    (folder / files.STUDY).write_text(json.dumps(study))


def _another_run(folder: Path) -> None:
    _edit(folder, files.FACTS, run_id="another")


def _more_shards(folder: Path) -> None:
    _edit(folder, files.FACTS, shards=4)


def _other_columns(folder: Path) -> None:
    _edit(folder, files.FACTS, columns=["id", "text", "weight"])


def _another_key(folder: Path) -> None:
    _edit(folder, files.FACTS, signing_key="0" * 64)


def _another_version(folder: Path) -> None:
    _edit(folder, files.FACTS, version=2)


def _nested(folder: Path) -> None:
    (folder / files.FACTS).write_text("[" * 100_000)


def _the_card_promises_more(folder: Path) -> None:
    (folder / files.CARD).write_text((folder / files.CARD).read_text() + "\nPerfectly anonymous.\n")


def _other_words(folder: Path) -> None:
    (folder / files.WORDS).write_text((folder / files.WORDS).read_text().replace("add up", "don't add up"))


def _croissant_of_elsewhere(folder: Path) -> None:
    text = (folder / files.CROISSANT).read_text()
    (folder / files.CROISSANT).write_text(text.replace('"contentUrl": "data/', '"contentUrl": "http://a.example/'))


def _text_of_json_lines(folder: Path) -> None:
    lines = gzip.decompress((folder / files.JSON_LINES).read_bytes()).splitlines(keepends=True)
    row = json.loads(lines[0])
    lines[0] = json.dumps(row | {"text": "another"}).encode() + b"\n"
    (folder / files.JSON_LINES).write_bytes(gzip.compress(b"".join(lines)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_half_the_epsilon, "privacy_statement.json: epsilon isn't what the study gives"),
        (_less_is_uncovered, "privacy_statement.json: not_covered isn't"),
        (_more_noise_is_claimed, "privacy_statement.json: tiers[0].releases[0].mechanism.steps isn't"),
        (_a_site_more, "privacy_statement.json: several_sites isn't"),
        (_another_study, "bundle.json is of another study"),
        (_another_run, "bundle.json is of another run"),
        (_more_shards, "a bundle of 4 shards has other files"),
        (_other_columns, "bundle.json names other columns"),
        (_another_key, "bundle.json names another key"),
        (_another_version, "bundle.json can't be read"),
        (_nested, "bundle.json can't be read"),
        (_the_card_promises_more, "README.md isn't the one of these texts"),
        (_other_words, "PRIVACY.md isn't the one"),
        (_croissant_of_elsewhere, "croissant.json isn't the one"),
        (_text_of_json_lines, "row 0 isn't the same in both formats"),
    ],
)
def test_a_forgery_is_named_even_if_the_publisher_signed_it(
    copy: Path, key: Ed25519PrivateKey, change: Change, said: str
) -> None:
    change(copy)
    seal_again(copy, key)
    assert said in problems_of(verify_bundle(copy, (), key.public_key()))


def test_twin_without_the_comparison_of_pages_a_card_may_promise_anything(
    copy: Path, key: Ed25519PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    _the_card_promises_more(copy)
    seal_again(copy, key)
    monkeypatch.setattr(verify_module, "_check_pages", lambda *_: [])
    assert verify_bundle(copy, (), key.public_key()).holds


def test_two_accountants_have_to_agree(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "second_epsilon", lambda tier: tier.epsilon + 0.01)
    assert "the strong tier claims epsilon" in problems_of(verify_bundle(bundle))


def _forget_a_ledger(ledgers: Path) -> None:
    (ledgers / "zebra-hospital.json").unlink()


def _forget_a_release(ledgers: Path) -> None:
    file = ledgers / "zebra-hospital.json"
    export = json.loads(file.read_text())
    export["events"] = [event for event in export["events"] if event["kind"] != "release"]
    file.write_text(json.dumps(export))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_forget_a_ledger, "1 weak sites have a part in the corpus; the ledgers that were given show 0"),
        (_forget_a_release, "1 weak sites have a part in the corpus; the ledgers that were given show 0"),
    ],
)
def test_every_site_that_has_a_part_has_to_show_its_ledger(
    finished: Finished, bundle: Path, tmp_path: Path, change: Change, said: str
) -> None:
    ledgers = Path(shutil.copytree(finished.ledgers, tmp_path / "ledgers"))
    change(ledgers)
    assert said in problems_of(verify_bundle(bundle, read_exports([ledgers])))


def test_ledgers_of_another_run_confirm_nothing(finished: Finished, copy: Path, key: Ed25519PrivateKey) -> None:
    run = finished.run
    summary = json.loads((run / "summary.json").read_text())
    other = changed_run(finished, copy.parent / "run", [("a", 0)])
    _edit(other, "summary.json", run_id="f" * 32, codes=json.loads((other / "summary.json").read_text())["codes"])
    write_bundle(other, copy.parent / "bundle", PUBLICATION, key)
    assert verify_bundle(copy.parent / "bundle").holds
    said = problems_of(verify_bundle(copy.parent / "bundle", read_exports([finished.ledgers])))
    assert summary["run_id"] != "f" * 32
    assert "1 strong sites have a part in the corpus; the ledgers that were given show 0" in said


@pytest.mark.parametrize(
    ("less", "said"),
    [
        ({"noise_multiplier": 80.0}, "site okapi-infirmary: its ledger charges other mechanisms than the study asks"),
        ({"noise_multiplier": None}, "site okapi-infirmary: its reservation can't be accounted for"),
    ],
)
def test_a_ledger_that_charges_less_is_not_believed(
    finished: Finished, bundle: Path, tmp_path: Path, less: dict[str, Any], said: str
) -> None:
    ledgers = Path(shutil.copytree(finished.ledgers, tmp_path / "ledgers"))
    export, last = json.loads((ledgers / "okapi-infirmary.json").read_text()), ""
    for event in export["events"]:
        if event["kind"] == "reservation":
            event["content"]["mechanisms"][0] |= less
        event["previous"] = last
        event["hash"] = last = chain_hash(last, event["sequence"], event["kind"], event["content"])
    (ledgers / "okapi-infirmary.json").write_text(json.dumps(export))
    assert said in problems_of(verify_bundle(bundle, read_exports([ledgers])))


def test_facts_that_claim_impossible_numbers_are_refused(bundle: Path) -> None:
    facts = json.loads((bundle / files.FACTS).read_text())
    for changes in ({"shards": 10**9}, {"shards": 0}, {"texts": -1}, {"memory_bytes": -1}, {"title": "a\nb"}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            Facts.model_validate(facts | changes)
