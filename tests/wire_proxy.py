"""A proxy between the processes of a cluster that loses, repeats or delays chosen messages.

    node ── tcp ──▶ WireProxy ── tcp ──▶ router          `Hello.side_channel` is rewritten on its
    decode ── tcp ──▶ WireProxy ── tcp ──▶ prefill       way up, so decode dials the proxy too

It works on the bytes of ZMTP without encryption (greeting, commands, then length-prefixed frames;
a DEALER's message to a ROUTER is one frame), so a connection that breaks on one side breaks on the
other, and nothing but what a test asks for changes. Use it from one event loop.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from common.messages import (
    Envelope,
    Hello,
    decode_to_decode,
    decode_to_node,
    decode_to_prefill,
    decode_to_router,
    encode,
)
from common.modes import DisaggregationMode

LOOPBACK = "127.0.0.1"
GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
"""Flags in the first byte of a frame."""

AnyEnvelope = Envelope[Any]


class Direction(StrEnum):
    """Where a message goes; each has a union of its own."""

    TO_NODE = "router to node"
    TO_ROUTER = "node to router"
    TO_PREFILL = "decode to prefill"
    TO_DECODE = "prefill to decode"


class Action(StrEnum):
    DROP = "drop"
    REPEAT = "repeat"
    DELAY = "delay"
    """Delivered late, behind what was sent after it, if the connection still stands by then."""


_DECODERS: dict[Direction, Callable[[bytes], AnyEnvelope]] = {
    Direction.TO_NODE: decode_to_node,
    Direction.TO_ROUTER: decode_to_router,
    Direction.TO_PREFILL: decode_to_prefill,
    Direction.TO_DECODE: decode_to_decode,
}


@dataclass
class Strike:
    """What will happen, once, to the next message of one type in one direction."""

    direction: Direction
    kind: type
    action: Action
    delay_s: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """The message has come by."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """And what was to happen to it has happened: one that is late has left."""

    def hits(self, direction: Direction, body: object) -> bool:
        return not self.done.is_set() and direction is self.direction and type(body) is self.kind


@dataclass
class _Pipe:
    """One direction of one connection."""

    direction: Direction
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def write(self, payload: bytes) -> None:
        """Send a message as one frame; nothing if the connection is gone."""
        if self.writer.is_closing():
            return
        if len(payload) < 256:
            self.writer.write(bytes((0, len(payload))) + payload)
        else:
            self.writer.write(bytes((LONG,)) + len(payload).to_bytes(8, "big") + payload)


class WireProxy:
    """Stands before one router; opens a port before each prefill node that says Hello."""

    def __init__(self, router_port: int, port: int) -> None:
        self._router_port = router_port
        self._port = port
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._open: set[tuple[bool, asyncio.Task[None]]] = set()
        self._strikes: list[Strike] = []
        self._mute: Callable[[Direction, AnyEnvelope], bool] = lambda _direction, _envelope: False
        self.seen: Counter[tuple[Direction, type]] = Counter()
        """How many messages of each type have come by."""

    @property
    def address(self) -> str:
        """Where nodes dial."""
        return f"tcp://{LOOPBACK}:{self._port}"

    @property
    def side_channel(self) -> str:
        """Where decode nodes dial the newest prefill node."""
        *_, port = (s.sockets[0].getsockname()[1] for s in self._servers.values())
        return f"tcp://{LOOPBACK}:{port}"

    async def start(self) -> None:
        await self._listen(LOOPBACK, self._router_port, self._port, is_peer=False)

    async def close(self) -> None:
        for server in self._servers.values():
            server.close()
        self.cut(router_links=True, peer_links=True)
        tasks = [task for _, task in self._open]
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ what tests ask for

    def strike(self, direction: Direction, kind: type, action: Action, delay_s: float) -> Strike:
        """Do `action` to the next message of this type."""
        made = Strike(direction, kind, action, delay_s)
        self._strikes.append(made)
        return made

    def cut(self, *, router_links: bool = False, peer_links: bool = False) -> None:
        """Break connections; the sockets behind them dial again by themselves."""
        for is_peer, task in tuple(self._open):
            if peer_links if is_peer else router_links:
                task.cancel()

    @contextlib.contextmanager
    def mute(self, swallows: Callable[[Direction, AnyEnvelope], bool]) -> Any:
        """While the body runs, messages for which `swallows` holds vanish."""
        before, self._mute = self._mute, swallows
        try:
            yield
        finally:
            self._mute = before

    # ------------------------------------------------------------ connections

    async def _listen(self, host: str, target: int, port: int, *, is_peer: bool) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._open.add((is_peer, task))
            try:
                await self._carry(host, target, is_peer, reader, writer)
            except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass  # however it ended, both sides see a connection that broke
            finally:
                self._open.discard((is_peer, task))
                writer.close()

        server = await asyncio.start_server(serve, LOOPBACK, port)
        self._servers[host, target] = server
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def _carry(
        self,
        host: str,
        target: int,
        is_peer: bool,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, target)
        up = Direction.TO_PREFILL if is_peer else Direction.TO_ROUTER
        down = Direction.TO_DECODE if is_peer else Direction.TO_NODE
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(_Pipe(up, reader, far_writer)))
                group.create_task(self._pump(_Pipe(down, far_reader, writer)))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            far_writer.close()

    async def _pump(self, pipe: _Pipe) -> None:
        """Forward until an end of the connection closes, which raises."""
        remaining = GREETING_BYTES  # in pieces: each side waits for the other's first bytes
        while remaining:
            piece = await pipe.reader.read(remaining)
            if not piece:
                raise asyncio.IncompleteReadError(piece, remaining)
            remaining -= len(piece)
            pipe.writer.write(piece)
        while True:
            head = await pipe.reader.readexactly(1)
            size = await pipe.reader.readexactly(8 if head[0] & LONG else 1)
            body = await pipe.reader.readexactly(int.from_bytes(size, "big"))
            if head[0] & COMMAND:
                pipe.writer.write(head + size + body)
                continue
            assert not head[0] & MORE, "a message of several frames on a DEALER's wire"
            await self._judge(pipe, body)
            await pipe.writer.drain()

    async def _judge(self, pipe: _Pipe, payload: bytes) -> None:
        envelope = _DECODERS[pipe.direction](payload)
        self.seen[pipe.direction, type(envelope.body)] += 1
        if isinstance(envelope.body, Hello) and envelope.body.role is DisaggregationMode.PREFILL:
            payload = await self._redirected(envelope, envelope.body)
        if self._mute(pipe.direction, envelope):
            return
        strike = next((s for s in self._strikes if s.hits(pipe.direction, envelope.body)), None)
        if strike is None:
            pipe.write(payload)
            return
        self._strikes.remove(strike)
        strike.done.set()
        match strike.action:
            case Action.DROP:
                pass
            case Action.REPEAT:
                pipe.write(payload)
                pipe.write(payload)
            case Action.DELAY:
                asyncio.get_running_loop().call_later(
                    strike.delay_s, self._late, pipe, payload, strike
                )
                return
        strike.over.set()

    @staticmethod
    def _late(pipe: _Pipe, payload: bytes, strike: Strike) -> None:
        pipe.write(payload)
        strike.over.set()

    async def _redirected(self, envelope: AnyEnvelope, hello: Hello) -> bytes:
        """The greeting of a prefill node, with a side channel that leads through here."""
        host, _, port = hello.side_channel.removeprefix("tcp://").rpartition(":")
        if (host, int(port)) in self._servers:
            bound: int = self._servers[host, int(port)].sockets[0].getsockname()[1]
        else:
            bound = await self._listen(host, int(port), 0, is_peer=True)
        told = msgspec.structs.replace(hello, side_channel=f"tcp://{LOOPBACK}:{bound}")
        return encode(msgspec.structs.replace(envelope, body=told))
