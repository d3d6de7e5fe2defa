"""A small model of the router for scheduler tests: dispatch, order, replay, one end for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.events import FromRouter
from common.messages import (
    Abort,
    Aborted,
    Adapter,
    Failed,
    FailureKind,
    Generate,
    Incarnation,
    Retracted,
    SamplingParams,
    StopReason,
    TokenOutput,
    Tokens,
    ToRouter,
)
from tests.unit.scheduler.model import Violation, reference, reference_scores

if TYPE_CHECKING:
    from tests.unit.scheduler.world import World


GONE = "its adapter was unloaded"


@dataclass
class Client:
    rid: str
    prompt: list[int]
    max_tokens: int
    stop: tuple[int, ...] = ()
    accepted: float = 0.0
    output: list[int] = field(default_factory=list)
    attempt: int = 0
    room: int = 0
    pair: tuple[Incarnation, Incarnation] | None = None
    """The nodes of the present attempt, the first one empty where decode computes the prompt
    itself; None while it waits."""
    decode_spoke: bool = False
    """Decode has sent a token of this attempt: prefill's death is no matter any more."""
    end: str | None = None
    ends: int = 0
    replays: int = 0
    aborted: bool = False
    adapter: Adapter | None = None
    wants_scores: bool = False
    """It asked for its prompt's logprobs."""
    scores: list[list[float]] = field(default_factory=list)
    """Each time that they came."""

    def expected(self) -> list[int]:
        digest = "" if self.adapter is None else self.adapter.digest
        tokens = reference(self.prompt, self.max_tokens, digest)
        for index, token in enumerate(tokens):
            if token in self.stop:
                return tokens[: index + 1]
        return tokens

    def check(self) -> None:
        """It was answered once, with the undisturbed tokens (or, cut short, their beginning)."""
        if self.ends != 1:
            raise Violation(f"{self.rid} ended {self.ends} times")
        cut_short = self.aborted or self.end == GONE
        expected = self.expected()[: len(self.output) if cut_short else None]
        if self.output != expected:
            raise Violation(f"{self.rid}: {self.output} is not {expected}")
        digest = "" if self.adapter is None else self.adapter.digest
        told = [reference_scores(self.prompt, digest)] if self.wants_scores and self.output else []
        if self.scores != told:
            raise Violation(f"{self.rid}: prompt logprobs {self.scores} are not {told}")


class ModelRouter:
    def __init__(self, world: World) -> None:
        self.world = world
        self.clients: list[Client] = []
        self.submitted = 0
        self.by_room: dict[int, Client] = {}
        self.muted: set[Incarnation] = set()
        """Nodes whose messages never arrive: they die before their sockets have sent them."""
        self.pending: dict[Incarnation, list[ToRouter]] = defaultdict(list)

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: tuple[int, ...] = (),
        adapter: Adapter | None = None,
    ) -> Client:
        self.submitted += 1
        client = Client(f"r{self.submitted}", prompt, max_tokens, stop, self.world.now)
        client.adapter = adapter
        self.clients.append(client)
        return client

    def turn(self) -> None:
        """Take in what has arrived, then dispatch whoever waits, oldest first."""
        for node, bodies in list(self.pending.items()):
            self.pending[node] = []
            for body in bodies:
                self._on_message(node, body)
        for client in self.clients:
            if client.end is None and client.pair is None:
                self._dispatch(client)

    def knows(self, adapter: Adapter) -> bool:
        """Whether a request may name it."""
        return not self.world.adapters.is_gone(adapter)

    def settle_adapters(self, wanted: Container[str]) -> None:
        """This router has no list of its own."""

    def receive(self, node: Incarnation, body: ToRouter) -> None:
        if node not in self.muted:
            self.pending[node].append(body)

    def forget_pending(self, node: Incarnation) -> None:
        self.pending.pop(node, None)

    def abort(self, client: Client) -> None:
        client.aborted = True
        self._end(client, "abort")

    def on_node_lost(self, node: Incarnation) -> None:
        self.pending.pop(node, None)
        for client in self.clients:
            if client.pair is None or node not in client.pair or client.end is not None:
                continue
            if not (client.decode_spoke and node == client.pair[0]):
                self._replay(client)

    def on_node_left(self, node: Incarnation) -> None:
        """It said goodbye: what it said before that counts."""
        for body in self.pending.pop(node, []):
            self._on_message(node, body)
        self.on_node_lost(node)

    def _dispatch(self, client: Client) -> None:
        if self.world.adapters.is_gone(client.adapter):
            self._end(client, GONE)
            return
        serving = self.world.adapters.serving(client.adapter)
        ready = [n for n in serving if self.world.nodes[n].takes_work]
        prefills = [n for n in ready if n.startswith("p")]
        decodes = [n for n in ready if n.startswith("d")]
        pick = self.world.random.choice
        share = self.world.local
        alone = share > 0 and (not prefills or self.world.random.random() < share)
        if not decodes or not (prefills or alone):
            return
        client.pair = ("" if alone else pick(prefills), pick(decodes))
        client.attempt += 1
        client.decode_spoke = False
        client.room = self.world.random.getrandbits(62) + 1
        self.by_room[client.room] = client
        for node in client.pair:
            self._send(node, self._generate(client))

    def _generate(self, client: Client) -> Generate:
        assert client.pair is not None
        return Generate(
            room=client.room,
            rid=client.rid,
            attempt=client.attempt,
            prompt_ids=client.prompt,
            output_ids=list(client.output),
            sampling=SamplingParams(
                max_tokens=client.max_tokens, seed=1, stop_token_ids=client.stop
            ),
            adapter=client.adapter,
            age_s=self.world.now - client.accepted,
            prefill_address="tcp://side" if client.pair[0] else "",
            prefill_incarnation=client.pair[0],
        )

    def _send(self, node: Incarnation, body: Generate | Abort) -> None:
        if node in self.world.nodes:
            repeats = 2 if self.world.random.random() < self.world.repeat else 1
            self.world.nodes[node].inbox.extend([FromRouter("router-1", body)] * repeats)

    def _on_message(self, node: Incarnation, body: ToRouter) -> None:
        match body:
            case Tokens(outputs):
                for output in outputs:
                    self._on_tokens(node, output)
            case Retracted(room) | Aborted(room):
                client = self._current(room, node)
                if client is not None:
                    self._replay(client)
            case Failed(room=room, kind=kind):
                client = self._current(room, node)
                if client is not None and kind in (FailureKind.INVALID, FailureKind.TOO_LARGE):
                    self._end(client, kind)
                elif client is not None:
                    self._replay(client)
            case _:
                raise Violation(f"unexpected {body}")

    def _current(self, room: int, node: Incarnation) -> Client | None:
        client = self.by_room.get(room)
        if client is None or client.end or client.room != room or client.pair is None:
            return None
        return client if node in client.pair else None

    def _on_tokens(self, node: Incarnation, output: TokenOutput) -> None:
        client = self._current(output.room, node)
        if client is None or client.pair is None:
            return
        client.decode_spoke |= node == client.pair[1]
        if output.index < len(client.output):
            return
        if output.index > len(client.output):
            raise Violation(f"{client.rid}: token {output.index} after {len(client.output)}")
        client.output += output.token_ids
        if output.finish is not None:
            self._end(client, "stop" if output.finish is StopReason.STOP else "length")

    def _replay(self, client: Client) -> None:
        client.replays += 1
        for node in client.pair or ():
            self._send(node, Abort(client.room))
        client.pair = None

    def _end(self, client: Client, reason: str) -> None:
        client.ends += 1
        client.end = reason
        for node in client.pair or ():
            self._send(node, Abort(client.room))

    def all_ended(self) -> bool:
        return all(client.end is not None for client in self.clients)

    def open_requests(self) -> list[str]:
        return [f"{c.rid} {c.pair} #{c.attempt}" for c in self.clients if c.end is None]

    def check(self) -> None:
        """Every client was answered once, with the undisturbed tokens."""
        for client in self.clients:
            client.check()
