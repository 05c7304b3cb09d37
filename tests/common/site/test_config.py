"""``site.toml``: what a hospital gets wrong is one sentence; limits have no defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import SiteConfigError, UserError
from common.site.config import Site

MINIMAL = """
name = "hospital-a"
tier = "weak"
size_class = 100
state = "/var/lib/fedcorpus"
[documents]
path = "/data/notes.parquet"
[policy]
max_epsilon = 10
max_delta = 1e-4
"""


def load(folder: Path, text: str) -> Site:
    path = folder / "site.toml"
    path.write_text(text, encoding="utf-8")
    return Site.load(path)


def test_smallest_site_file_can_be_read(tmp_path: Path) -> None:
    site = load(tmp_path, MINIMAL)
    assert (site.tier, site.ledger_path) == ("weak", Path("/var/lib/fedcorpus/ledger.sqlite"))
    assert site.documents.column_of("topic") == "topic"


def test_columns_may_have_other_names_than_attributes(tmp_path: Path) -> None:
    site = load(tmp_path, MINIMAL.replace("[policy]", "[documents.code_columns]\ntopic = 'Thema'\n[policy]"))
    assert (site.documents.column_of("topic"), site.documents.column_of("stars")) == ("Thema", "stars")


@pytest.mark.parametrize(
    ("old", "new", "where", "part"),
    [
        ("[policy]\nmax_epsilon = 10\nmax_delta = 1e-4", "", "policy", "missing"),
        ("max_epsilon = 10", "", "policy.max_epsilon", "missing"),
        ("max_delta = 1e-4", "", "policy.max_delta", "missing"),
        (
            "max_epsilon = 10",
            "max_epsilon = 0",
            "policy.max_epsilon",
            "0 isn't accepted: input should be greater than 0",
        ),
        ("max_epsilon = 10", "max_epsilon = inf", "policy.max_epsilon", "inf isn't accepted"),
        ("max_delta = 1e-4", "max_delta = 1", "policy.max_delta", "1 isn't accepted"),
        (
            "[policy]",
            "[policy]\nmax_epsilon_per_study = -1",
            "policy.max_epsilon_per_study",
            "-1 isn't accepted",
        ),
        (
            "[policy]",
            "[policy]\nallowed_units = ['person']",
            "policy.allowed_units.0",
            "'record' or 'patient'",
        ),
        ("[policy]", "[policy]\nallowed_studies = 'all'", "policy.allowed_studies: 'all'", "'any'"),
        ("[policy]", "[policy]\nmax_epsilom = 1", "policy.max_epsilom", "unknown key"),
        (
            'tier = "weak"',
            'tier = "medium"',
            "tier",
            "'medium' isn't accepted: input should be 'strong' or 'weak'",
        ),
        ("size_class = 100", "size_class = 0", "size_class", "0 isn't accepted"),
        ("size_class = 100", "", "size_class", "missing"),
        ('name = "hospital-a"', 'name = "Haus Süd"', "name", "'Haus Süd' isn't accepted"),
        ('"/data/notes.parquet"', '"notes.parquet"', "documents.path is 'notes.parquet'", "absolute path"),
        ('"/var/lib/fedcorpus"', '"~/state"', "state is '~/state'", "absolute path"),
        ("[policy]", "on_malformed = 'ignore'\n[policy]", "documents.on_malformed", "'skip' or 'stop'"),
        ("[policy]", "colour = 1\n[policy]", "documents.colour", "unknown key"),
        ("[policy]", "[policy]\ncomposition = 'gdp'", "policy.composition", "'basic' or 'renyi'"),
        ("[policy]", "[policy]\nallowed_requests = ['dump']", "policy.allowed_requests.0", "'train' or"),
        ("[policy]", "[policy]\nmax_candidates = 0", "policy.max_candidates", "0 isn't accepted"),
        ("[documents]", "ledger_key_file = 'key'\n[documents]", "ledger_key_file is 'key'", "absolute path"),
        ("[documents]", "[machine]\ngradients = 'fast'\n[documents]", "machine.gradients", "'fused' or 'opacus'"),
        (
            "[documents]",
            "[machine]\ngradients = 'opacus'\ncheckpointing = true\n[documents]",
            "machine: checkpointing is on and gradients is 'opacus'",
            "needs 'fused'",
        ),
        ("[policy]", "[policy", "not valid TOML", ""),
    ],
)
def test_mistake_in_a_site_file_is_one_sentence_with_field_value_and_what_is_accepted(
    tmp_path: Path, old: str, new: str, where: str, part: str
) -> None:
    assert old in MINIMAL
    with pytest.raises(SiteConfigError) as caught:
        load(tmp_path, MINIMAL.replace(old, new, 1))
    sentence = str(caught.value)
    assert sentence.startswith(f"{tmp_path / 'site.toml'}: {where}")
    assert part in sentence
    assert "\n" not in sentence
    assert isinstance(caught.value, UserError)


def test_missing_site_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SiteConfigError, match=r"none\.toml: no such file"):
        Site.load(tmp_path / "none.toml")
