"""Administrative verbs: sent to nodes, answered one by one, waited for with a bound."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.messages import (
    Admin,
    AdminReply,
    AdminVerb,
    Continue,
    Drain,
    Incarnation,
    NodeState,
    Pause,
)
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
    digest: str = ""
    """Of the adapter that was loaded."""
    lost: bool = False
    """It will not answer: its link is gone, or is a new one."""
    late: bool = False
    """It has not answered in time, but still may do what it was asked."""

    def info(self) -> dict[str, object]:
        """For the client that asked."""
        return {
            "name": self.name,
            "role": self.role,
            "incarnation": self.incarnation,
            "ok": self.ok,
            "message": self.message,
        }


@dataclass(slots=True, eq=False)
class _Round:
    """One verb on its way to some nodes."""

    verb: AdminVerb
    waiting: dict[Incarnation, Node]
    answers: list[NodeAnswer]
    done: asyncio.Event


class AdminDesk:
    """Numbers the verbs and collects the replies. `send` puts messages on their way."""

    def __init__(self, send: Callable[[Sequence[Send]], None]) -> None:
        self._send = send
        self._last_id = 0
        self._rounds: dict[int, _Round] = {}

    async def carry_out(
        self, nodes: Iterable[Node], verb: AdminVerb, timeout_s: float
    ) -> list[NodeAnswer]:
        """Have nodes do something: one answer of each, made up for those that give none in time."""
        asked = tuple(nodes)
        self._last_id += 1
        round_id = self._last_id
        waiting = {node.incarnation: node for node in asked}
        current = _Round(verb, waiting, [], asyncio.Event())
        self._rounds[round_id] = current
        pausing = isinstance(verb, Pause)
        for node in asked:  # what it gives back must not be given to it again before it replies
            node.pausing += pausing
            if isinstance(verb, Drain):
                node.note_state(NodeState.DRAINING)
        try:
            admin = Admin(id=round_id, verb=verb)
            self._send([Send(node.incarnation, admin) for node in asked])
            if waiting:
                await asyncio.wait_for(current.done.wait(), timeout_s)
        except TimeoutError:
            for incarnation in tuple(waiting):
                message = f"no answer within {timeout_s:.3g} s"
                self._note(
                    current, incarnation, AdminReply(id=0, ok=False, message=message), late=True
                )
        finally:
            del self._rounds[round_id]
            for node in asked:
                node.pausing -= pausing
        return current.answers

    def tell(self, nodes: Iterable[Node], verb: AdminVerb) -> None:
        """Have nodes do something, whatever they answer."""
        self._last_id += 1
        self._send([Send(node.incarnation, Admin(id=self._last_id, verb=verb)) for node in nodes])

    def on_reply(self, incarnation: Incarnation, reply: AdminReply) -> None:
        """One node's reply; its state is known with it, half a second before its heartbeat."""
        current = self._rounds.get(reply.id)
        if current is None or incarnation not in current.waiting:
            return
        node = current.waiting[incarnation]
        self._note(current, incarnation, reply)
        match current.verb:
            case Pause() if reply.ok:
                node.note_state(NodeState.PAUSED)
            case Continue() if reply.ok:
                node.note_state(NodeState.READY)
            case _:
                pass

    def on_node_loss(self, incarnation: Incarnation) -> None:
        """A node will not answer any more."""
        reply = AdminReply(id=0, ok=False, message="the node was lost")
        for current in self._rounds.values():
            if incarnation in current.waiting:
                self._note(current, incarnation, reply, lost=True)

    @staticmethod
    def _note(
        current: _Round,
        incarnation: Incarnation,
        reply: AdminReply,
        *,
        lost: bool = False,
        late: bool = False,
    ) -> None:
        node = current.waiting.pop(incarnation)
        current.answers.append(
            NodeAnswer(
                node.hello.name,
                node.role.value,
                incarnation,
                reply.ok,
                reply.message,
                reply.digest,
                lost,
                late,
            )
        )
        if not current.waiting:
            current.done.set()
