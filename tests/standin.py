"""Stand-in nodes: asyncio tasks that speak the real wire protocol with made-up tokens.

The token at an absolute index depends only on the prompt, the adapter's content and that index, so
every interruption can be checked against `expected_tokens`. Faults are asked for by method: `mute`,
`die`, `lose_message`. The content of an adapter is what `disk` says of its path.
"""

import asyncio
import contextlib
import itertools
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from common.credentials import ClusterKeys
from common.gatekeeper import dial_with
from common.messages import (
    WIRE_VERSION,
    Abort,
    Aborted,
    AbortRequests,
    Admin,
    AdminReply,
    CacheUpdate,
    Continue,
    Drain,
    Envelope,
    Failed,
    FailureKind,
    Fingerprint,
    FlushCache,
    Generate,
    Goodbye,
    Heartbeat,
    Hello,
    ListCache,
    LoadAdapter,
    NodeState,
    NodeStats,
    Pause,
    PeerGone,
    Peers,
    Ping,
    Refused,
    Retracted,
    StopReason,
    TokenLogprob,
    TokenOutput,
    Tokens,
    ToRouter,
    UnloadAdapter,
    Welcome,
    decode_to_node,
    encode,
)
from common.modes import DisaggregationMode, PauseMode
from tests.standin_adapters import AdapterShelf

FINGERPRINT = Fingerprint(
    wire_version=WIRE_VERSION,
    model="standin",
    dtype="float32",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    page_size=16,
)
_FIRST_TOKEN, _TOKEN_RANGE = 35, 60
"""Tokens of the tiny tokenizer that are plain ASCII characters."""

_serial = itertools.count(1)


def expected_token(prompt_ids: Sequence[int], index: int, digest: str = "") -> int:
    """The token that every stand-in draws at an absolute output index."""
    flavour = zlib.crc32(digest.encode()) if digest else 0
    drawn = sum(prompt_ids) * 31 + len(prompt_ids) + index * 7 + flavour
    return _FIRST_TOKEN + drawn % _TOKEN_RANGE


def expected_tokens(prompt_ids: Sequence[int], count: int, digest: str = "") -> list[int]:
    return [expected_token(prompt_ids, i, digest) for i in range(count)]


def expected_prompt_logprobs(prompt_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """What every stand-in says of a prompt: less probable with its place and its id."""
    return [
        TokenLogprob(
            -position - token / 1000, tuple((token + i, -float(i)) for i in range(num_top)), num_top
        )
        for position, token in enumerate(prompt_ids[1:], 1)
    ]


@dataclass
class _Room:
    generate: Generate
    next_index: int
    ready: bool = False


@dataclass
class StandIn:
    """One node. `async with` joins the router and leaves it again."""

    role: DisaggregationMode
    router: str
    name: str = ""
    num_pages: int = 64
    max_model_len: int = 512
    max_running_requests: int = 8
    fingerprint: Fingerprint = FINGERPRINT
    step_s: float = 0.005
    heartbeat_s: float = 0.05
    silent_decode: bool = False
    """Takes requests and never answers them."""
    received: list[object] = field(default_factory=list)
    rooms: dict[int, _Room] = field(default_factory=dict)
    paused: bool = False
    draining: bool = False
    shakes_hands: bool = True
    """Whether it reports a link to each prefill node that the router announces."""
    linked_peers: list[str] = field(default_factory=list)
    keys: ClusterKeys | None = None
    script: list[int] = field(default_factory=list)
    """Tokens that it draws instead of the known ones, in this order; the last one ever after."""
    disk: dict[str, str] = field(default_factory=dict)
    """Path of an adapter to the digest of its content; what is not there cannot be loaded."""

    def __post_init__(self) -> None:
        self.name = self.name or f"{self.role}-{next(_serial)}"
        self.incarnation = f"{self.name}-{next(_serial)}"
        self.joined = asyncio.Event()
        self.resets = 0
        self.refusals: list[str] = []
        self._router_incarnation = ""
        self._seq = self._cache_seq = 0
        self.cached: set[int] = set()
        """Keys of the pages it says it has."""
        self._muted = False
        self._tasks: list[asyncio.Task[None]] = []
        self.shelf = AdapterShelf(self._send, self.disk)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        dial_with(self._socket, self.keys)

    async def __aenter__(self) -> "StandIn":
        self._socket.connect(self.router)
        self._tasks = [
            asyncio.create_task(work)
            for work in (
                self._receive(),
                self._beat(),
                self._step_forever(),
                self.shelf.serve(),
            )
        ]
        await self.greet()
        async with asyncio.timeout(20):
            await self.joined.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    # ------------------------------------------------------------ faults

    async def die(self) -> None:
        """End like a killed process: the connection breaks, nothing is said."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._socket.close(0)
        self._context.term()

    def mute(self) -> None:
        """Fall silent like a stopped process; the connection stays."""
        self._muted = True

    def unmute(self) -> None:
        self._muted = False

    def lose_message(self) -> None:
        """One message to the router gets lost."""
        self._seq += 1

    async def say_goodbye(self) -> None:
        await self._send(Goodbye())

    async def greet(self) -> None:
        self._seq = self._cache_seq = 0
        self.rooms.clear()
        await self._send(
            Hello(
                role=self.role,
                name=self.name,
                url="http://127.0.0.1:1",
                pid=1,
                served_model_name="standin",
                fingerprint=self.fingerprint,
                max_model_len=self.max_model_len,
                max_running_requests=self.max_running_requests,
                num_pages=self.num_pages,
                side_channel=f"tcp://{self.name}:1",
            )
        )

    async def send_raw(self, payload: bytes) -> None:
        await self._socket.send(payload)

    async def send_tokens(self, output: TokenOutput) -> None:
        await self._send(Tokens([output]))

    async def publish(self, *stored: int, reset: bool = False, raw: bytes = b"") -> None:
        """Say that these pages are cached, by their keys; `raw` is said in place of them."""
        self.cached.update(stored)
        self._cache_seq += 1
        packed = raw or array("Q", stored).tobytes()
        await self._send(CacheUpdate(seq=self._cache_seq, reset=reset, stored=packed))

    def lose_update(self) -> None:
        """What was to be said of the cache is lost, and nothing else."""
        self._cache_seq += 1

    def got(self, kind: type) -> list[object]:
        return [message for message in self.received if isinstance(message, kind)]

    # ------------------------------------------------------------ protocol

    async def _send(self, body: ToRouter) -> None:
        if self._muted:
            return
        self._seq += 1
        to = "" if isinstance(body, Hello) else self._router_incarnation
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send(encode(Envelope(self.incarnation, to, self._seq, body)))

    async def _receive(self) -> None:
        while True:
            envelope = decode_to_node(await self._socket.recv())
            body = envelope.body
            if self._muted:
                continue
            self.received.append(body)
            match body:
                case Welcome(reset=reset):
                    self._router_incarnation = envelope.source
                    if reset:
                        self.resets += 1
                        self.rooms.clear()
                    await self.shelf.tell()
                    self.joined.set()
                case Refused(reason):
                    self.refusals.append(reason)
                case Ping() if envelope.seq == 0:
                    await self.greet()
                case Generate():
                    await self._start(body)
                case Admin(id=ticket, verb=LoadAdapter() | UnloadAdapter() as adapter_verb):
                    self.shelf.ask(ticket, adapter_verb)
                case Abort(room):
                    self.rooms.pop(room, None)
                case Admin(id=ticket, verb=verb):
                    await self._administer(ticket, verb)
                case Peers(nodes) if self.shakes_hands:
                    self.linked_peers = [node.incarnation for node in nodes]
                    await self._heartbeat()
                case ListCache():
                    await self.publish(*self.cached, reset=True)
                case Ping() | PeerGone() | Peers():
                    pass

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)
            if self.joined.is_set():
                await self._heartbeat()

    async def _heartbeat(self) -> None:
        state = NodeState.PAUSED if self.paused else NodeState.READY
        stats = NodeStats(
            state=NodeState.DRAINING if self.draining else state,
            running=len(self.rooms) if self.role is DisaggregationMode.DECODE else 0,
            num_pages=self.num_pages,
            free_pages=self.num_pages,
            linked_peers=self.linked_peers,
        )
        await self._send(Heartbeat(stats=stats, step_age_s=0.0))

    async def _administer(self, ticket: int, verb: object) -> None:
        match verb:
            case Pause(mode):
                self.paused = True
                for room in tuple(self.rooms) if mode is not PauseMode.IN_PLACE else ():
                    del self.rooms[room]
                    answer = Retracted(room) if mode is PauseMode.RETRACT else Aborted(room)
                    await self._send(answer)
            case Continue():
                self.paused = False
            case Drain():
                self.draining = True
            case AbortRequests(rid):
                for room, state in tuple(self.rooms.items()):
                    if rid in ("", state.generate.rid):
                        del self.rooms[room]
                        await self._send(Aborted(room))
            case FlushCache():
                if self.rooms:
                    reply = AdminReply(id=ticket, ok=False, message="requests hold pages")
                    await self._send(reply)
                    return
        await self._send(AdminReply(id=ticket, ok=True))

    async def _start(self, generate: Generate) -> None:
        adapter = generate.adapter
        if adapter is not None and self.shelf.holds().get(adapter.name) != adapter.digest:
            message = f"{self.name} does not hold {adapter}"
            failed = Failed(room=generate.room, kind=FailureKind.ADAPTER, message=message)
            await self._send(failed)
            return
        self.rooms[generate.room] = _Room(generate, len(generate.output_ids))

    # ------------------------------------------------------------ tokens

    async def retract_all(self) -> None:
        """Give every request back, as under memory pressure."""
        for room in tuple(self.rooms):
            del self.rooms[room]
            await self._send(Retracted(room))

    async def _step_forever(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if self.paused or self.silent_decode:
                continue
            outputs = [
                output for state in tuple(self.rooms.values()) for output in self._step(state)
            ]
            if outputs:
                await self._send(Tokens(outputs))

    def _step(self, state: _Room) -> list[TokenOutput]:
        generate, index = state.generate, state.next_index
        sampling = generate.sampling
        first = index == len(generate.output_ids)
        digest = generate.adapter.digest if generate.adapter is not None else ""
        token = expected_token(generate.prompt_ids, index, digest)
        if self.script:
            token = self.script[min(index, len(self.script) - 1)]
        finish = None
        if token in sampling.stop_token_ids:
            finish = StopReason.STOP
        elif index + 1 == sampling.max_tokens:
            finish = StopReason.LENGTH
        logprobs = None
        if sampling.logprobs is not None:
            top = tuple((token + i, -1.0 - i) for i in range(sampling.logprobs))
            logprobs = [TokenLogprob(-0.5, top)]
        computes = not generate.prefill_incarnation
        state.next_index += 1
        if self.role is DisaggregationMode.PREFILL or finish is not None:
            del self.rooms[generate.room]
        if first and finish is not None and not computes:
            return []  # prefill has told the router, and this node on the side channel
        scores = None
        if first and computes and sampling.prompt_logprobs is not None:
            scores = expected_prompt_logprobs(generate.prompt_ids, sampling.prompt_logprobs)
        cached = 8 if computes and first and len(generate.prompt_ids) > 8 else 0
        return [
            TokenOutput(
                room=generate.room,
                index=index,
                token_ids=[token],
                logprobs=logprobs,
                finish=finish,
                cached_tokens=cached,
                prompt_logprobs=scores,
            )
        ]
