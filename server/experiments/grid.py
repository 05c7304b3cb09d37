"""A grid without sockets: the real strategies on one side, the app's real ClientApp on the other, one process.

The simulation engine starts a pool of processes for every run, each with a model of its own; an experiment makes
hundreds of small runs. Here a site answers when it is asked, with its own site file, documents, ledger and noise, and
the model that one site has loaded serves the next. What a reply says is what would cross the wire. Uses two internals
of Flower 1.42, which the project pins: the task's identity and a message's number.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from common.client_app import app as client_app

Answer = Callable[[Message, Context], Message]


class InProcessGrid(Grid):
    """Sites by number, from 1.

    Parameters
    ----------
    sites
        Number -> site file.
    hostile
        Number -> what a site runs instead of the app.
    """

    def __init__(self, sites: Mapping[int, Path], hostile: Mapping[int, Answer] | None = None) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self._contexts = {node: Context(1, node, {"site": str(file)}, RecordDict(), {}) for node, file in sites.items()}
        self._hostile = dict(hostile or {})
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """There is one run."""

    @property
    def run(self) -> Any:
        """There is one run."""
        return None

    def create_message(self, *_: Any, **__: Any) -> Message:
        """Flower's old way to make one; nobody takes it."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """All sites are there."""
        return list(self._contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """All sites, with no registered name, as in simulation."""
        return [NodeInfo(node_id=node, name="", status="online") for node in self._contexts]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have every site answer, one after the other."""
        numbers = []
        for message in messages:
            number = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = number
            node = message.metadata.dst_node_id
            self._replies[number] = self._hostile.get(node, client_app)(message, self._contexts[node])
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Their replies."""
        return [self._replies.pop(number) for number in list(message_ids) if number in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Both."""
        return self.pull_messages(self.push_messages(list(messages)))
