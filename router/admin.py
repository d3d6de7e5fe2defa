"""Administrative verbs: sent to nodes, answered one by one, waited for with a bound."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from common.messages import Admin, AdminReply, AdminVerb, Incarnation
from router.effects import Send
from router.node import Node


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """What one node said to a verb."""

    name: str
    role: str
    incarnation: Incarnation
    ok: bool
    message: str


@dataclass(slots=True)
class _Round:
    """One verb on its way to some nodes."""

    verb: AdminVerb
    waiting: dict[Incarnation, Node]
    answers: list[NodeAnswer]
    done: asyncio.Future[None]


class AdminDesk:
    """Numbers the verbs and collects the replies."""

    def __init__(self) -> None:
        self._last_id = 0
        self._rounds: dict[int, _Round] = {}

    def begin(self, nodes: Iterable[Node], verb: AdminVerb) -> tuple[int, list[Send]]:
        """Open a round; the messages are the caller's to send."""
        self._last_id += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = {node.incarnation: node for node in nodes}
        self._rounds[self._last_id] = _Round(verb, waiting, [], done)
        if not waiting:
            done.set_result(None)
        admin = Admin(id=self._last_id, verb=verb)
        return self._last_id, [Send(incarnation, admin) for incarnation in waiting]

    def on_reply(self, node: Incarnation, reply: AdminReply) -> AdminVerb | None:
        """Note one node's reply. Returns the verb if it was waited for and was carried out."""
        current = self._rounds.get(reply.id)
        if current is None or node not in current.waiting:
            return None
        self._note(current, node, reply.ok, reply.message)
        return current.verb if reply.ok else None

    def on_node_loss(self, node: Incarnation) -> None:
        """A node will not answer any more."""
        for current in self._rounds.values():
            if node in current.waiting:
                self._note(current, node, False, "the node was lost")

    async def finish(self, round_id: int, timeout_s: float) -> list[NodeAnswer]:
        """Wait for all replies, at most `timeout_s`; those missing are named in the answers."""
        current = self._rounds[round_id]
        try:
            await asyncio.wait([current.done], timeout=timeout_s)
        finally:
            del self._rounds[round_id]
        for node in tuple(current.waiting):
            self._note(current, node, False, f"no answer within {timeout_s:g} s")
        return current.answers

    @staticmethod
    def _note(current: _Round, incarnation: Incarnation, ok: bool, message: str) -> None:
        node = current.waiting.pop(incarnation)
        answer = NodeAnswer(node.hello.name, node.role.value, incarnation, ok, message)
        current.answers.append(answer)
        if not current.waiting and not current.done.done():
            current.done.set_result(None)
