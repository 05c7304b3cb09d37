"""A Grid without sockets: the real ServerApp and the real ClientApps in one process, over the real wire format.

Every message is taken apart and put together again as Flower does, so what can't be serialised fails here too. Uses
internals of Flower 1.42, which the project pins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from common.client_app import app as client_app

Answer = Callable[[Message, Context], Message]


class InProcessGrid(Grid):
    """Sites by node id.

    Parameters
    ----------
    sites
        Node id -> site file.
    names
        Names under which node keys are registered; unregistered as in simulation if left out.
    offline
        Nodes for which the SuperLink answers, as often as given here, that they are unavailable.
    silent
        Message type -> the node that never answers it.
    answer
        What runs at a site; the app's ClientApp unless a test puts a hostile one in.
    """

    def __init__(
        self,
        sites: Mapping[int, Path],
        names: Mapping[int, str] | None = None,
        offline: Mapping[int, int] | None = None,
        silent: Mapping[str, int] | None = None,
        answer: Answer = client_app,
    ) -> None:
        identify()
        self.contexts = {node: Context(1, node, {"site": str(file)}, RecordDict(), {}) for node, file in sites.items()}
        self._names, self._offline, self._answer = dict(names or {}), dict(offline or {}), answer
        self._silent = dict(silent or {})
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=i, name=self._names.get(i, ""), status="online") for i in self.contexts]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for original in messages:
            message = _over_the_wire(original)
            original.metadata.__dict__["_message_id"] = message.metadata.message_id
            self.sent.append(message)
            ids.append(message.metadata.message_id)
            if self._silent.get(message.metadata.message_type) == message.metadata.dst_node_id:
                continue
            reply = _over_the_wire(self._reply(message))
            self.received.append(reply)
            self._replies[message.metadata.message_id] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(list(messages)))

    def _reply(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if self._offline.get(node, 0) > 0:
            self._offline[node] -= 1
            return Message(Error(code=ErrorCode.NODE_UNAVAILABLE, reason="unavailable"), reply_to=message)
        try:
            return self._answer(message, self.contexts[node])
        except Exception as error:
            # What a real SuperNode sends: the exception's own text. Our ClientApp must never let it come to this.
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=str(error)), reply_to=message)


def identify() -> None:
    """Let messages be made in this process, as Flower's own processes are allowed to."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1


def _over_the_wire(message: Message) -> Message:
    objects = {key: value.deflate() for key, value in get_all_nested_objects(message).items()}
    identity = message.object_id
    copy = inflate_object_from_contents(identity, objects)
    copy.metadata.__dict__["_message_id"] = identity
    return copy
