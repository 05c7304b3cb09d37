"""The audits at a smaller size: no claim is refuted, every twin is caught, and the statistics are right themselves.

Noise can't be seeded. A correct mechanism fails one of these with a probability of at most 1e-4, and by simulation the
twins chosen here are missed less often than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from common.privacy.accounting import StrongPlan, WeakPlan
from common.privacy.noise import Csprng
from tests.audit import noise, training, votes
from tests.audit.__main__ import main
from tests.audit.bounds import (
    clopper_pearson_upper,
    correlation_pvalue,
    discrete_gaussian_pvalue,
    gaussian_epsilon,
    gdp_mu_bound,
    one_run_epsilon,
    one_run_refutes,
    variance_pvalue,
)
from tests.audit.finding import Audit, Finding, Measurement, quiet

REPLAYS, GROSS_REPLAYS = 800, 300


@pytest.fixture(scope="module")
def record_site(tmp_path_factory: pytest.TempPathFactory) -> votes.Scene:
    return votes.scene(tmp_path_factory.mktemp("record"), "record")


@pytest.fixture(scope="module")
def patient_site(tmp_path_factory: pytest.TempPathFactory) -> votes.Scene:
    return votes.scene(tmp_path_factory.mktemp("patient"), "patient")


@pytest.fixture(scope="module")
def strong_site(tmp_path_factory: pytest.TempPathFactory) -> training.Scene:
    return training.scene(tmp_path_factory.mktemp("strong") / "wide-llama")


@pytest.mark.parametrize(("site", "profile_cells"), [("record_site", 1), ("patient_site", 2)])
def test_the_audited_unit_moves_all_that_the_plan_allows(
    site: str, profile_cells: int, request: pytest.FixtureRequest
) -> None:
    """Else the audit would be of an easier claim; and if it moved more, the plan would be wrong."""
    scene: votes.Scene = request.getfixturevalue(site)
    _, plan = votes.as_it_ships(scene)
    assert (plan.votes.cells_per_unit, plan.profile.cells_per_unit) == (votes.NEIGHBOURS, profile_cells)
    moved = votes.exact_difference(scene, plan)
    assert set(moved.tolist()) == {0, 1}
    assert moved[: len(scene.pool)].sum() == votes.NEIGHBOURS
    assert moved[len(scene.pool) :].sum() == profile_cells


@pytest.mark.parametrize("site", ["record_site", "patient_site"])
def test_replayed_votes_and_profile_keep_their_joint_epsilon(site: str, request: pytest.FixtureRequest) -> None:
    measured = votes.measure(*votes.as_it_ships(request.getfixturevalue(site)), REPLAYS)
    assert not measured.refuted, measured


@pytest.mark.parametrize(
    ("altered", "replays"),
    [
        (partial(votes.less_noise, factor=0.6), REPLAYS),
        (votes.sensitivity_one, GROSS_REPLAYS),
        (votes.no_noise, GROSS_REPLAYS),
    ],
    ids=["noise x0.6", "square root of K forgotten", "noise off"],
)
def test_votes_with_too_little_noise_are_caught(
    altered: Callable[[votes.Scene], tuple[votes.Scene, WeakPlan]], replays: int, record_site: votes.Scene
) -> None:
    """Twins."""
    measured = votes.measure(*altered(record_site), replays)
    assert measured.refuted, measured


def test_a_patient_whose_notes_all_vote_is_caught(patient_site: votes.Scene) -> None:
    """Twin: the cap of votes lifted."""
    measured = votes.measure(*votes.every_note_a_unit(patient_site), GROSS_REPLAYS)
    assert measured.refuted, measured


SAMPLINGS = pytest.mark.parametrize(("rate", "steps"), [(1.0, 1), (0.5, 8)])


@SAMPLINGS
def test_training_keeps_its_epsilon_against_a_thousand_canaries(
    rate: float, steps: int, strong_site: training.Scene
) -> None:
    measured = training.measure(*training.as_it_ships(strong_site.with_sampling(rate, steps)))
    assert not measured.refuted, measured


@SAMPLINGS
@pytest.mark.parametrize("altered", [training.no_noise, training.clip_times_ten])
def test_training_without_noise_or_with_loose_clipping_is_caught(
    altered: Callable[[training.Scene], tuple[training.Scene, StrongPlan]],
    rate: float,
    steps: int,
    strong_site: training.Scene,
) -> None:
    """Twins."""
    measured = training.measure(*altered(strong_site.with_sampling(rate, steps)))
    assert measured.refuted, measured


@pytest.mark.parametrize("measure", [noise.gradient_noise, noise.count_noise])
def test_noise_has_its_scale_and_shape_and_three_percent_less_is_caught(
    measure: Callable[[float], Measurement],
) -> None:
    assert not (measured := measure(1.0)).refuted, measured
    assert (measured := measure(0.97)).refuted, measured


def test_sampling_is_poisson_and_batches_of_fixed_size_are_caught() -> None:
    assert not (measured := noise.sampling(Csprng().poisson_sample)).refuted, measured
    assert (measured := noise.sampling(noise.shuffled)).refuted, measured


@pytest.mark.parametrize("refuted", [False, True])
@pytest.mark.parametrize("changed", ["", "noise off"])
def test_verdicts_and_exit_status_follow_what_was_refuted(
    changed: str, refuted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = Audit("votes", changed, lambda _: Measurement("epsilon 4", "epsilon >= 9", refuted))
    monkeypatch.setattr(votes, "audits", lambda *_: iter([audit]))
    monkeypatch.setattr(training, "audits", lambda *_: iter(()))
    monkeypatch.setattr(noise, "audits", lambda: iter(()))
    expected = {("", False): "holds", ("", True): "REFUTED", ("noise off", True): "caught"}.get(
        (changed, refuted), "MISSED"
    )
    assert Finding(audit, audit.measure(quiet)).verdict == expected
    assert main() == (0 if expected in ("holds", "caught") else 1)
    assert capsys.readouterr().out.rstrip().endswith(expected)


# The statistics themselves, on data whose truth is known. These are seeded: nothing here is private.


def test_clopper_pearson_is_exact() -> None:
    assert clopper_pearson_upper(0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert clopper_pearson_upper(100, 100, 0.05) == 1.0


def test_the_bound_on_a_gaussian_exceeds_the_truth_no_more_often_than_it_may() -> None:
    generator, trials, repeats, significance = np.random.default_rng(0), 400, 500, 0.1
    for mu in (0.5, 1.0, 3.0):
        without, with_unit = generator.normal(size=(2, repeats, trials))
        false_positives = (without >= mu / 2).sum(axis=1)
        false_negatives = (with_unit + mu < mu / 2).sum(axis=1)
        bounds = [
            gdp_mu_bound(int(p), int(n), trials, significance)
            for p, n in zip(false_positives, false_negatives, strict=True)
        ]
        assert np.mean(np.array(bounds) > mu) <= significance
        assert np.median(bounds) > 0.5 * mu, "nor is it empty"


def test_no_errors_prove_much_and_no_signal_proves_nothing() -> None:
    assert gdp_mu_bound(0, 0, 1000, 1e-4) > 4
    assert gdp_mu_bound(500, 500, 1000, 1e-4) == 0
    assert gdp_mu_bound(0, 1000, 1000, 1e-4) == 0
    assert gaussian_epsilon(0.0, 1e-4) == 0
    assert gaussian_epsilon(1.0431, 1e-4) == pytest.approx(4.0, abs=0.01)


@pytest.mark.parametrize("guesses", [100, 1000])
def test_perfect_guesses_prove_what_the_binomial_says(guesses: int) -> None:
    """With delta 0 the theorem is ``p^guesses <= significance``."""
    exact = -math.log(1e-4 ** (-1 / guesses) - 1)
    assert one_run_epsilon(guesses, guesses, guesses, 0.0, 1e-4) == pytest.approx(exact, abs=0.011)
    assert one_run_epsilon(1000, 1000, 1000, 0.0, 1e-4) == pytest.approx(4.68, abs=0.011)


def test_the_price_of_delta_makes_the_one_run_bound_smaller() -> None:
    bounds = [one_run_epsilon(1000, 1000, 1000, delta, 1e-4) for delta in (0.0, 1e-6, 1e-5, 1e-4)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == 0, "why the audit of training claims a smaller delta"


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0])
def test_randomised_response_is_refuted_no_more_often_than_it_may(epsilon: float) -> None:
    """The mechanism for which the one-run bound is tight: each canary's bit told truly with probability p."""
    p, guesses, significance = 1 / (1 + math.exp(-epsilon)), 500, 0.05
    correct = np.random.default_rng(0).binomial(guesses, p, size=1000)
    refuted = np.mean([one_run_refutes(guesses, guesses, int(c), epsilon, 0.0, significance) for c in correct])
    assert 0.01 < refuted <= significance + 0.02
    assert not one_run_refutes(guesses, guesses, 0, epsilon, 0.0, significance)
    assert one_run_refutes(guesses, guesses, guesses, epsilon, 0.0, significance)


def test_tests_of_noise_are_uniform_on_true_noise() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(scale=2.0, size=(200, 1000))
    small = np.mean([variance_pvalue(row, 2.0) < 0.1 for row in values])
    related = np.mean([correlation_pvalue(row[1:] / 2, row[:-1] / 2) < 0.1 for row in values])
    assert 0.03 < small < 0.19
    assert 0.03 < related < 0.19
    assert correlation_pvalue(values[0] / 2, values[0] / 2) < 1e-6


def test_rounded_normals_are_no_discrete_gaussian_at_a_small_scale() -> None:
    """At scale 3 nobody can tell them apart; at 0.5 the test must."""
    normals = np.random.default_rng(0).normal(size=100_000)
    assert discrete_gaussian_pvalue(np.rint(0.5 * normals).astype(np.int64), 0.5) < 1e-6
    k = np.arange(-10, 11)
    mass = np.exp(-(k**2) / (2 * 0.5**2))
    exact = np.random.default_rng(0).choice(k, p=mass / mass.sum(), size=100_000)
    assert discrete_gaussian_pvalue(exact, 0.5) > 1e-3
