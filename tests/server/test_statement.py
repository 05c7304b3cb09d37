"""The privacy statement: true of every site that the study admits, never better than it is, and said in plain words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import PrivacyError
from common.privacy.accounting import joint_epsilon
from common.site.plan import strong_plan
from common.study import Study
from server import statement as statement_module
from server.statement import (
    NOT_COVERED,
    PrivacyStatement,
    accountant,
    privacy_statement,
    second_epsilon,
    to_text,
)
from tests.hospitals import small_study

NOISE = {"delta": 1e-4, "training_noise_multiplier": 8.0, "vote_noise_multiplier": 4.0}


def _study(privacy: dict[str, Any], **changes: Any) -> Study:
    return Study.model_validate(small_study(Path("model"), **changes) | {"privacy": privacy})


def _statement(study: Study, strong: int = 2, weak: int = 3) -> PrivacyStatement:
    return privacy_statement(study, study.sha256, "r", {"strong": strong, "weak": weak}, accountant("0.6.0"))


def test_where_the_study_promises_an_epsilon_it_is_stated_and_two_accountants_confirm_it() -> None:
    study = _study({"epsilon": 4.0, "delta": 1e-4})
    stated = _statement(study)
    assert (stated.epsilon, stated.delta) == (4.0, 1e-4)
    for tier in stated.tiers:
        assert 3.98 < second_epsilon(tier) <= 4.0
    assert [[r.release for r in tier.releases] for tier in stated.tiers] == [
        ["training", "profile"],
        ["votes", "profile"],
    ]


def test_where_the_study_gives_the_noise_the_worst_tier_and_size_class_are_stated() -> None:
    study = _study(NOISE)
    stated = _statement(study)
    strong, weak = stated.tiers
    assert stated.epsilon == max(strong.epsilon, weak.epsilon) == weak.epsilon > strong.epsilon
    assert strong.size_class == study.federation.min_documents
    larger = [strong_plan(study, size).epsilon for size in (20, 21, 40, 1000)]
    assert sorted(larger, reverse=True) == larger
    assert strong.epsilon >= larger[0] > strong.epsilon - 0.001


@pytest.mark.parametrize("epsilon", [1.0004, 1.23456, 0.0005])
def test_an_epsilon_is_only_ever_rounded_up(epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert epsilon <= statement_module._up(epsilon) < epsilon + 0.001


@pytest.mark.parametrize(
    ("delta", "times", "stated"),
    [
        (1e-4, 1, 1e-4),
        (1e-4, 3, 3e-4),
        (1.23456789e-5, 1, 1.23457e-5),
        (1.2345611e-5, 1, 1.23457e-5),
        (0.4, 3, 1.0),
        (1e-15, 1, 1e-15),
    ],
)
def test_a_delta_is_only_ever_rounded_up_and_printed_as_it_is_stated(delta: float, times: int, stated: float) -> None:
    found = statement_module._delta(delta, times)
    assert found == stated
    assert float(f"{found:g}") == found


def test_a_delta_that_was_solved_is_rounded_up_too() -> None:
    noise = {"training_noise_multiplier": 8.0, "vote_noise_multiplier": 8.0}
    study = _study({"epsilon": 0.5, **noise})
    stated = _statement(study, weak=0)
    plan = strong_plan(study, 20)
    assert plan.delta <= stated.delta < plan.delta * 1.00001
    assert joint_epsilon(plan.mechanisms, stated.delta) <= 0.5 + 1e-6


def test_a_person_at_several_sites_is_told_the_sum() -> None:
    stated = _statement(_study(NOISE))
    assert [s.sites for s in stated.several_sites] == [2, 5]
    assert stated.several_sites[1].epsilon == pytest.approx(5 * stated.epsilon, abs=0.001)
    assert stated.several_sites[1].delta == 5e-4
    assert not _statement(_study(NOISE), strong=1, weak=0).several_sites


def test_tiers_without_a_site_are_left_out_and_no_site_at_all_is_an_error() -> None:
    study = _study(NOISE)
    assert [tier.tier for tier in _statement(study, weak=0).tiers] == ["strong"]
    with pytest.raises(PrivacyError, match="no site has a part"):
        _statement(study, strong=0, weak=0)


def test_a_promise_that_is_none_is_not_stated() -> None:
    with pytest.raises(PrivacyError, match="a finite one is needed"):
        statement_module._up(float("inf"))


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_the_words_say_unit_adjacency_mechanisms_assumption_and_what_is_not_covered(unit: str) -> None:
    stated = _statement(_study(NOISE | {"unit": unit, "max_grad_norm": 0.5}))
    words = to_text(stated)
    for said in (
        f"(ε={stated.epsilon:.3f}, δ=0.0001)-differentially private",
        f"The unit is the {unit}: {stated.unit_means}",
        "Two data sets are neighbours if one has one unit more",
        "4 steps. In each a unit takes part with probability 0.4",
        "clipped to the norm C=0.5",
        "standard deviation 8.0000 C",
        "discrete Gaussian noise of scale 4.000",
        "as one privacy loss distribution",
        "dp-accounting 0.6.0 PLD, interval 0.0001",
        stated.assumption,
        "What the language model knew before",
        "governance",
    ):
        assert said in words, said
    assert set(NOT_COVERED) <= set(stated.not_covered)
    assert all(f"- {line}" in words for line in stated.not_covered)
    # A document isn't a person, and only where it is the unit that has to be said.
    assert ("The unit is a document, not a person" in words) == (unit == "record")


def test_the_papers_accounting_is_named() -> None:
    stated = _statement(_study({"epsilon": 4.0, "delta": 1e-4, "accounting": "paper"}), weak=1, strong=0)
    assert "accounted one by one; their epsilons and deltas are added" in to_text(stated)
    assert second_epsilon(stated.tiers[0]) <= stated.epsilon


def test_the_statement_survives_json_and_has_nothing_that_is_no_number() -> None:
    stated = _statement(_study(NOISE))
    text = stated.model_dump_json()
    assert PrivacyStatement.model_validate_json(text) == stated
    json.loads(text, parse_constant=pytest.fail)


def test_names_in_the_words_are_data() -> None:
    study = _study(NOISE)
    hostile = privacy_statement(study, "x`y\n# z", "`\u202e", {"weak": 1}, "<b>[x](y)")
    words = to_text(hostile)
    assert "\\<b\\>\\[x\\](y)" in words
    assert "Study `x'y # z`, run `' `." in words
