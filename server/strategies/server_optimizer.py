"""What the server does with a round's combined adapter: FedAvg, FedAvgM or FedAdam (Reddi et al. 2021).

The same steps as Flower's strategies of these names take, with one difference: what is remembered belongs to a weight
and not to the run. With alternating LoRA a round trains half of the weights, and the other half's moments wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.protocol import Adapter
from common.study import ServerUpdate


class ServerOptimizer:
    """The server's optimiser; all it sees is noised.

    Parameters
    ----------
    options
        Of the study.
    state
        What `state` gave when the run was left.

    Attributes
    ----------
    state
        Moments in float64, by ``KIND/PARAMETER``; empty for FedAvg.
    """

    def __init__(self, options: ServerUpdate, state: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._options = options
        self.state: dict[str, NDArray[Any]] = dict(state or {})

    def step(self, sent: Adapter, combined: Adapter) -> Adapter:
        """The next adapter, float32.

        Parameters
        ----------
        sent
            The adapter that the round began with.
        combined
            The weights that the round trained, combined over the sites. The others stay as they were.
        """
        rule = {"fedavg": self._average, "fedavgm": self._momentum, "fedadam": self._adam}[self._options.optimizer]
        return {**sent, **{name: rule(name, sent[name], value).astype(np.float32) for name, value in combined.items()}}

    def _average(self, _: str, _old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        return new

    def _momentum(self, name: str, old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        moved = self._moment("momentum", name, old)
        moved *= self._options.momentum
        moved += new.astype(np.float64) - old
        return np.asarray(old + (self._options.learning_rate or 1.0) * moved)

    def _adam(self, name: str, old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
        options, change = self._options, new.astype(np.float64) - old
        first, second = self._moment("first", name, old), self._moment("second", name, old)
        first[...] = options.beta_1 * first + (1 - options.beta_1) * change
        second[...] = options.beta_2 * second + (1 - options.beta_2) * change**2
        count = self.state.setdefault(f"count/{name}", np.zeros((), dtype=np.int64))
        count += 1
        # One more than the number of updates, as in Flower.
        exponent = int(count) + 1
        rate = (options.learning_rate or 1.0) * math.sqrt(1 - options.beta_2**exponent) / (1 - options.beta_1**exponent)
        return np.asarray(old + rate * first / (np.sqrt(second) + options.tau))

    def _moment(self, kind: str, name: str, like: NDArray[Any]) -> NDArray[Any]:
        return self.state.setdefault(f"{kind}/{name}", np.zeros(like.shape, dtype=np.float64))
