"""Phase 1: federated averaging of DP-trained LoRA adapters over the strong sites (RAFT, phase 1).

The server sends the adapter, every strong site runs E DP-SGD steps and returns its noisy adapter, and the mean with
public weights is the next adapter. With frozen A the mean of the B is exact: mean(B_i) A = mean(B_i A).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from common.errors import FedcorpusError, QuorumError
from common.models.generator import check_adapter
from common.protocol import TRAIN, Adapter, TrainReply, TrainRequest, addressed
from common.study import Study
from server.census import Roster, SiteRecord, failure_code, sent_to
from server.progress import Progress

log = logging.getLogger("fedcorpus.server")

Checkpoint = Callable[[int, Adapter], None]
Profile = NDArray[np.int64]


@dataclass(frozen=True)
class FineTuned:
    """Result of phase 1; everything is noised.

    Attributes
    ----------
    adapter
        The averaged adapter after the last round.
    profiles
        Noisy profile of each strong site that answered, int64 ``(codes,)``.
    """

    adapter: Adapter
    profiles: Mapping[str, Profile]


class LoraDpFedAvg(Strategy):
    """FedAvg over the strong sites of a roster; a site that fails costs its contribution, not the run."""

    def __init__(
        self,
        study: Study,
        run_id: str,
        roster: Roster,
        frozen_sha256: str,
        progress: Progress,
        checkpoint: Checkpoint,
    ) -> None:
        self._study = study
        self._run_id = run_id
        self._roster = roster
        self._sites = {site.node_id: site for site in roster.of_tier("strong")}
        self._frozen_sha256 = frozen_sha256
        self._progress = progress
        self._checkpoint = checkpoint
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._sent: list[Message] = []
        self._profiles: dict[str, Profile] = {}

    def fine_tune(self, grid: Grid, initial: Adapter) -> FineTuned:
        """Run R rounds from ``initial``.

        Raises
        ------
        QuorumError
            If fewer strong sites than the study's minimum gave a valid answer in a round.
        """
        self._shapes = {name: value.shape for name, value in initial.items()}
        result = self.start(
            grid,
            _to_arrays(initial),
            num_rounds=self._study.training.rounds,
            timeout=self._study.federation.round_seconds,
        )
        return FineTuned(_to_adapter(result.arrays), dict(self._profiles))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One training request for every strong site that is online."""
        online = set(grid.get_node_ids())
        for site in self._sites.values():
            if site.node_id not in online:
                self._lost(site, "offline")
        request = TrainRequest(self._study, self._run_id, server_round, _to_adapter(arrays), self._frozen_sha256)
        records = request.to_records()
        self._sent = [
            Message(
                addressed(records, site.ledger),
                dst_node_id=node,
                message_type=TRAIN,
                group_id=str(server_round),
            )
            for node, site in self._sites.items()
            if node in online
        ]
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Mean of the valid adapters, with public weights."""
        nodes, silent = sent_to(self._sent), {m.metadata.dst_node_id for m in self._sent}
        adapters: dict[str, Adapter] = {}
        for message in replies:
            node = nodes[message.metadata.reply_to_message_id]
            silent.discard(node)
            adapter = self._accept(self._sites[node], message)
            if adapter is not None:
                adapters[self._sites[node].name] = adapter
        for node in silent:
            self._lost(self._sites[node], "no answer in time")
        self._require_quorum(server_round, adapters)
        mean = self._mean(adapters)
        self._checkpoint(server_round, mean)
        self._progress.step("training", server_round, self._study.training.rounds)
        return _to_arrays(mean), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing is evaluated at a site: a loss would be one more release."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing was asked."""
        return None

    def summary(self) -> None:
        """Log the public settings."""
        training = self._study.training
        log.info(
            "LoraDpFedAvg: %d strong sites, %d rounds of %d steps, weights %s, %d adapter weights",
            len(self._sites),
            training.rounds,
            training.steps,
            training.weights,
            sum(int(np.prod(shape)) for shape in self._shapes.values()),
        )

    def _accept(self, site: SiteRecord, message: Message) -> Adapter | None:
        if message.has_error():
            self._lost(site, failure_code(message))
            return None
        try:
            reply = TrainReply.from_records(message.content, codes=len(self._study.codes))
            check_adapter(reply.adapter, self._shapes)
        except FedcorpusError:
            self._lost(site, "malformed adapter")
            return None
        if reply.profile is not None:
            self._profiles.setdefault(site.name, reply.profile)
        site.answered()
        self._roster.saw(site, reply.ledger)
        return reply.adapter

    def _lost(self, site: SiteRecord, reason: str) -> None:
        site.failed(reason)
        self._progress.note(f"strong site {site.name} gave nothing this round: {reason}")

    def _require_quorum(self, server_round: int, adapters: Mapping[str, Adapter]) -> None:
        needed = self._study.federation.min_strong
        if len(adapters) >= needed:
            return
        states = ", ".join(f"{site.name} ({site.outcome})" for site in self._sites.values())
        raise QuorumError(
            f"round {server_round}: {len(adapters)} strong sites answered, the study needs {needed}: {states}"
        )

    def _mean(self, adapters: Mapping[str, Adapter]) -> Adapter:
        weights = np.array([self._weight(name) for name in adapters], dtype=np.float64)
        weights /= weights.sum()
        return {
            name: np.tensordot(weights, np.stack([a[name] for a in adapters.values()]), axes=1).astype(np.float32)
            for name in self._shapes
        }

    def _weight(self, site: str) -> float:
        if self._study.training.weights == "equal" or site not in self._profiles:
            return 1.0
        return float(max(1, self._profiles[site].sum()))


def _to_arrays(adapter: Adapter) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value, dtype=np.float32)) for name, value in adapter.items()})


def _to_adapter(arrays: ArrayRecord) -> Adapter:
    return {name: array.numpy() for name, array in arrays.items()}
