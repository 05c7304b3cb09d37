"""Phase 1: federated averaging of DP-trained LoRA adapters over the strong sites (RAFT, phase 1).

The server sends the adapter, every strong site runs E DP-SGD steps and returns the weights that the round trains,
noised; combined with public weights and through the server's optimiser they make the next adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from common.errors import FedcorpusError, QuorumError
from common.models.generator import check_adapter
from common.models.lora import trained_names
from common.protocol import TRAIN, Adapter, TrainReply, TrainRequest, addressed
from common.site.plan import strong_plan
from common.study import Study
from server.census import Roster, SiteRecord, failure_code, sent_to, welcome
from server.checkpoint import Checkpoint
from server.progress import Progress
from server.strategies.aggregation import RoundReport, report_round, signal_to_noise, trimmed_mean, weighted_mean
from server.strategies.server_optimizer import ServerOptimizer

log = logging.getLogger("fedcorpus.server")

OnRound = Callable[[Checkpoint], None]
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
    reports
        What the updates of each round say.
    """

    adapter: Adapter
    profiles: Mapping[str, Profile]
    reports: Sequence[RoundReport]


class LoraDpFedAvg(Strategy):
    """FedAvg over the strong sites of a roster; a site that fails costs its contribution, not the run.

    A site that shows up between rounds joins.

    Parameters
    ----------
    start
        Where to go on from.
    on_round
        Called with the state after every round, before the next begins.
    """

    def __init__(
        self,
        study: Study,
        run_id: str,
        roster: Roster,
        frozen_sha256: str,
        progress: Progress,
        start: Checkpoint,
        on_round: OnRound,
    ) -> None:
        self._study = study
        self._run_id = run_id
        self._roster = roster
        self._frozen_sha256 = frozen_sha256
        self._progress = progress
        self._on_round = on_round
        self._finished = start.round
        self._optimizer = ServerOptimizer(study.training.server, start.optimizer)
        self._profiles: dict[str, Profile] = dict(start.profiles)
        self._reports = list(start.reports)
        self._adapter: Adapter = start.adapter
        self._sent: list[Message] = []

    @property
    def _sites(self) -> Mapping[int, SiteRecord]:
        return {site.node_id: site for site in self._roster.of_tier("strong")}

    def fine_tune(self, grid: Grid, initial: Adapter) -> FineTuned:
        """Run the rounds that are left, from ``initial`` if none is finished.

        Raises
        ------
        QuorumError
            If fewer strong sites than the study's minimum gave a valid answer in a round.
        """
        self._adapter = self._adapter or initial
        left = self._study.training.rounds - self._finished
        if left:
            # Flower counts from 1; what a round is called here goes on from those that are finished.
            timeout = self._study.federation.round_seconds
            self.start(grid, _to_arrays(self._adapter), num_rounds=left, timeout=timeout)
        return FineTuned(self._adapter, dict(self._profiles), list(self._reports))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One training request for every strong site that is online."""
        for site in welcome(grid, self._study, self._run_id, self._roster):
            self._progress.note(f"{site.tier} site {site.name} has joined")
        online = set(grid.get_node_ids())
        for site in self._sites.values():
            if site.node_id not in online:
                self._lost(site, "offline")
        this_round = self._finished + 1
        request = TrainRequest(self._study, self._run_id, this_round, self._adapter, self._frozen_sha256)
        records = request.to_records()
        self._sent = [
            Message(
                addressed(records, site.ledger),
                dst_node_id=node,
                message_type=TRAIN,
                group_id=str(this_round),
            )
            for node, site in self._sites.items()
            if node in online
        ]
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next adapter, from the valid ones; the run's state is durable when this returns."""
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
        self._require_quorum(adapters)
        self._finished += 1
        self._report(adapters)
        self._adapter = self._optimizer.step(self._adapter, self._combined(adapters))
        self._on_round(
            Checkpoint(
                round=self._finished,
                adapter=self._adapter,
                optimizer=self._optimizer.state,
                profiles=self._profiles,
                sites=self._roster.known(),
                reports=self._reports,
            )
        )
        self._progress.step("training", self._finished, self._study.training.rounds)
        return _to_arrays(self._adapter), None

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
            "LoraDpFedAvg: %d strong sites, rounds %d to %d of %d steps, %s, %s weights, server %s, "
            "LoRA %s of %d weights",
            len(self._sites),
            self._finished + 1,
            training.rounds,
            training.steps,
            training.aggregation,
            training.weights,
            training.server.optimizer,
            self._study.generator.lora,
            sum(value.size for value in self._adapter.values()),
        )

    def _accept(self, site: SiteRecord, message: Message) -> Adapter | None:
        if message.has_error():
            self._lost(site, failure_code(message))
            return None
        try:
            reply = TrainReply.from_records(message.content, codes=len(self._study.codes))
            check_adapter(reply.adapter, self._shapes())
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

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """What a site must answer in this round."""
        names = trained_names(self._study.generator.lora, self._adapter, self._finished + 1)
        return {name: self._adapter[name].shape for name in names}

    def _require_quorum(self, adapters: Mapping[str, Adapter]) -> None:
        needed = self._study.federation.min_strong
        if len(adapters) >= needed:
            return
        states = ", ".join(f"{site.name} ({site.outcome})" for site in self._sites.values())
        raise QuorumError(
            f"round {self._finished + 1}: {len(adapters)} strong sites answered, the study needs {needed}: {states}"
        )

    def _combined(self, adapters: Mapping[str, Adapter]) -> Adapter:
        if self._study.training.aggregation == "trimmed-mean":
            return trimmed_mean(list(adapters.values()), self._study.training.trim)
        return weighted_mean(list(adapters.values()), [self._weight(name) for name in adapters])

    def _report(self, adapters: Mapping[str, Adapter]) -> None:
        sizes = {site.name: site.size_class for site in self._sites.values()}
        noise = [strong_plan(self._study, sizes[name]).training.noise_multiplier for name in adapters]
        weights = sum(value.size for value in next(iter(adapters.values())).values())
        report = report_round(self._finished, self._adapter, adapters, signal_to_noise(self._study, noise, weights))
        self._reports.append(report)
        self._progress.note(str(report))
        log.info("%s", report)

    def _weight(self, site: str) -> float:
        if self._study.training.weights == "equal" or site not in self._profiles:
            return 1.0
        return float(max(1, self._profiles[site].sum()))


def _to_arrays(adapter: Adapter) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value, dtype=np.float32)) for name, value in adapter.items()})
