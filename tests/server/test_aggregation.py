"""Combining adapters, and the server's optimiser beside Flower's own strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedTrimmedAvg
from hypothesis import given
from hypothesis import strategies as st

from common.protocol import Adapter
from common.site.plan import strong_plan
from common.study import ServerUpdate, Study
from server.strategies.aggregation import report_round, signal_to_noise, trimmed_mean, weighted_mean
from server.strategies.server_optimizer import ServerOptimizer
from tests.hospitals import small_study
from tests.in_process import identify

SHAPES = {"x.lora_A.w": (2, 5), "x.lora_B.w": (4, 2)}


def _adapter(seed: int, names: Sequence[str] = tuple(SHAPES)) -> Adapter:
    source = np.random.default_rng(seed)
    return {name: source.standard_normal(SHAPES[name]).astype(np.float32) for name in names}


def _flower(strategy: Any, sent: Adapter, server_round: int, adapters: Sequence[Adapter]) -> Adapter:
    """One round of a strategy of Flower's own."""
    identify()
    strategy.current_arrays = (
        {name: value.copy() for name, value in sent.items()}
        if isinstance(strategy, FedAdam)
        else ArrayRecord({name: Array(value) for name, value in sent.items()})
    )
    replies = []
    for node, adapter in enumerate(adapters):
        content = RecordDict(
            {
                "arrays": ArrayRecord({name: Array(value) for name, value in adapter.items()}),
                "metrics": MetricRecord({"num-examples": 1}),
                "config": ConfigRecord({}),
            }
        )
        asked = Message(RecordDict({}), dst_node_id=node + 1, message_type="train")
        replies.append(Message(content, reply_to=asked))
    arrays, _ = strategy.aggregate_train(server_round, replies)
    return {name: array.numpy() for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("options", "flower"),
    [
        ({"optimizer": "fedavgm"}, FedAvgM(server_learning_rate=1.0, server_momentum=0.9)),
        (
            {"optimizer": "fedavgm", "momentum": 0.5, "learning_rate": 0.3},
            FedAvgM(server_learning_rate=0.3, server_momentum=0.5),
        ),
        ({"optimizer": "fedadam", "learning_rate": 0.01}, FedAdam(eta=0.01)),
        (
            {"optimizer": "fedadam", "learning_rate": 0.2, "beta_1": 0.5, "beta_2": 0.9, "tau": 0.1},
            FedAdam(eta=0.2, beta_1=0.5, beta_2=0.9, tau=0.1),
        ),
    ],
    ids=["momentum", "momentum and rate", "adam", "adam with all"],
)
def test_the_servers_optimisers_go_the_way_of_flowers(options: dict[str, Any], flower: Any) -> None:
    ours, ours_sent = ServerOptimizer(ServerUpdate.model_validate(options)), _adapter(0)
    theirs_sent = _adapter(0)
    for server_round in range(1, 6):
        adapters = [_adapter(10 * server_round + site) for site in range(3)]
        theirs_sent = _flower(flower, theirs_sent, server_round, adapters)
        ours_sent = ours.step(ours_sent, weighted_mean(adapters, [1, 1, 1]))
        for name in SHAPES:
            np.testing.assert_allclose(ours_sent[name], theirs_sent[name], rtol=2e-5, atol=2e-6)
    assert all(value.dtype == np.float32 for value in ours_sent.values())


def test_fedavg_takes_the_combined_adapter() -> None:
    combined = _adapter(3)
    optimizer = ServerOptimizer(ServerUpdate())
    assert all(np.array_equal(v, combined[n]) for n, v in optimizer.step(_adapter(0), combined).items())
    assert not optimizer.state


@pytest.mark.parametrize("optimizer", ["fedavgm", "fedadam"])
def test_an_optimiser_goes_on_from_its_state(optimizer: str) -> None:
    options = ServerUpdate(optimizer=optimizer, learning_rate=0.1)  # type: ignore[arg-type]
    whole, resumed, forgetful = (ServerOptimizer(options) for _ in range(3))
    adapters = [_adapter(i) for i in range(4)]
    for combined in adapters[:2]:
        last = whole.step(_adapter(9), combined)
        resumed.step(_adapter(9), combined)
    stored = {name: array.copy() for name, array in resumed.state.items()}
    resumed = ServerOptimizer(options, stored)
    last, again = whole.step(last, adapters[2]), resumed.step(last, adapters[2])
    assert all(np.array_equal(last[name], again[name]) for name in last)
    afresh = forgetful.step(_adapter(9), adapters[2])
    assert not all(np.array_equal(again[name], afresh[name]) for name in again)


def test_weights_that_a_round_does_not_train_stay_and_their_moments_wait() -> None:
    """With alternating LoRA a weight's own updates count, not the run's rounds."""
    a, b = SHAPES
    options = ServerUpdate(optimizer="fedadam", learning_rate=0.1)
    both, alone, sent = ServerOptimizer(options), ServerOptimizer(options), _adapter(0)
    for server_round in range(4):
        name = (b, a)[server_round % 2]
        after = both.step(sent, _adapter(server_round, [name]))
        other = a if name == b else b
        assert np.array_equal(after[other], sent[other])
        if name == b:
            expected = alone.step({b: sent[b]}, _adapter(server_round, [b]))
            assert np.array_equal(after[b], expected[b])
        sent = after


@pytest.mark.parametrize("trim", [0.0, 0.2, 0.34, 0.49])
@pytest.mark.parametrize("sites", [1, 2, 3, 5, 7])
def test_the_trimmed_mean_is_flowers(trim: float, sites: int) -> None:
    adapters = [_adapter(site) for site in range(sites)]
    theirs = _flower(FedTrimmedAvg(beta=trim), _adapter(9), 1, adapters)
    ours = trimmed_mean(adapters, trim)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


@given(st.floats(-(2.0**99), 2.0**99, width=32))
def test_one_hostile_site_cannot_move_the_trimmed_mean_beyond_the_others(sent: float) -> None:
    honest = [_adapter(site) for site in range(4)]
    hostile = {name: np.full(shape, sent, np.float32) for name, shape in SHAPES.items()}
    result = trimmed_mean([*honest, hostile], 0.2)
    for name in SHAPES:
        values = np.stack([adapter[name] for adapter in honest])
        assert (result[name] >= values.min(axis=0) - 1e-6).all()
        assert (result[name] <= values.max(axis=0) + 1e-6).all()


def test_one_hostile_site_moves_the_mean_as_far_as_it_likes() -> None:
    """Twin."""
    hostile = {name: np.full(shape, 1e30, np.float32) for name, shape in SHAPES.items()}
    result = weighted_mean([*(_adapter(site) for site in range(4)), hostile], [1.0] * 5)
    assert min(value.min() for value in result.values()) > 1e29


def test_weights_are_shares() -> None:
    one, two = _adapter(1), _adapter(2)
    mean = weighted_mean([one, two], [300, 100])
    for name in SHAPES:
        np.testing.assert_allclose(mean[name], 0.75 * one[name] + 0.25 * two[name], rtol=1e-6)


def test_a_report_has_every_sites_norm_and_its_cosine_with_the_others() -> None:
    zero = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    ones = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    size = sum(math.prod(shape) for shape in SHAPES.values())
    report = report_round(4, ones, {"a": zero, "b": {n: 3 * v for n, v in ones.items()}, "c": zero}, 0.5)
    assert [u.site for u in report.updates] == ["a", "b", "c"]
    assert [u.norm for u in report.updates] == pytest.approx([math.sqrt(size), 2 * math.sqrt(size), math.sqrt(size)])
    # Changes of -1, +2 and -1 in every weight.
    assert [u.cosine for u in report.updates] == pytest.approx([-1, -1, -1])
    three = report_round(4, ones, {"a": zero, "b": zero, "c": ones}, 0.5)
    assert [u.cosine for u in three.updates] == [pytest.approx(1), pytest.approx(1), None]
    alone = report_round(4, ones, {"a": zero}, 0.5)
    assert (alone.shared, alone.updates[0].cosine) == (None, None)
    assert "a 4.24" in str(alone)


def test_a_site_that_sends_back_what_it_got_has_no_direction() -> None:
    ones = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    report = report_round(1, ones, {"a": ones, "b": ones}, 0.5)
    assert report.shared is None
    assert {u.cosine for u in report.updates} == {None}


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_the_shared_part_of_noisy_updates_is_estimated(share: float) -> None:
    shape = (40_000,)
    source = np.random.default_rng(1)
    common = source.standard_normal(shape)
    adapters = {
        str(site): {
            "w": (math.sqrt(share) * common + math.sqrt(1 - share) * source.standard_normal(shape)).astype("f4")
        }
        for site in range(4)
    }
    report = report_round(1, {"w": np.zeros(shape, np.float32)}, adapters, 1.0)
    assert report.shared == pytest.approx(share, abs=0.02)


def test_signal_to_noise_is_what_a_simulated_round_shows() -> None:
    """Best case, drawn: every step's mean gradient has norm C and one direction; noise as the sites add it."""
    study = Study.model_validate(small_study(Path("."), training={"steps": 9, "batch_size": 10}))
    sigmas, size = [strong_plan(study, n).training.noise_multiplier for n in (20, 40)], 10_000
    source = np.random.default_rng(0)
    direction = np.full(size, 1 / math.sqrt(size))
    steps = [
        np.mean([direction + sigma / 10 * source.standard_normal(size) for sigma in sigmas], axis=0) for _ in range(9)
    ]
    total = np.sum(steps, axis=0)
    signal = total @ direction
    noise = np.linalg.norm(total - signal * direction)
    assert signal / noise == pytest.approx(signal_to_noise(study, sigmas, size), rel=0.05)
