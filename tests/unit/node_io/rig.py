"""A router made of one plain socket, and nodes with short time-outs, for the socket tests."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import zmq

from common.credentials import ClusterKeys
from common.events import Event
from common.messages import (
    WIRE_VERSION,
    Envelope,
    Fingerprint,
    Heartbeat,
    Hello,
    PeerMemory,
    ToNode,
    ToRouter,
    Welcome,
    decode_to_router,
    encode,
)
from common.modes import DisaggregationMode
from common.node_io.peer_dialler import PeerDialler
from common.node_io.peer_server import PeerServer
from common.node_io.settings import IOSettings, NodeIdentity, Registration
from common.node_io.thread import NodeIO

HEARTBEAT_S = 0.05
SILENCE_S = 0.4
PATIENCE_S = 5.0

FINGERPRINT = Fingerprint(
    wire_version=WIRE_VERSION,
    model="tiny",
    dtype="float32",
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
    page_size=4,
)
MEMORY = PeerMemory(
    agent_name="agent",
    metadata=b"meta",
    base_address=4096,
    num_pages=8,
    page_bytes=512,
    first_head=0,
    num_heads=1,
)
REGISTRATION = Registration(
    served_model_name="tiny",
    fingerprint=FINGERPRINT,
    memories=(MEMORY,),
    max_model_len=64,
    max_running_requests=4,
)

Found = TypeVar("Found", bound=Event)


def eventually(ask: Callable[[], object], what: str = "nothing came of it") -> None:
    """Wait until `ask()` is true."""
    end = time.monotonic() + PATIENCE_S
    while not ask():
        assert time.monotonic() < end, what
        time.sleep(0.005)


class Engine:
    """Stands in for the engine thread: keeps what it drained."""

    def __init__(self, io: NodeIO) -> None:
        self.io = io
        self.seen: list[Event] = []

    def get(self, kind: type[Found], where: Callable[[Found], bool] = lambda _: True) -> Found:
        """The first such event not taken before; waits for it."""
        end = time.monotonic() + PATIENCE_S
        while True:
            self.seen.extend(self.io.drain())
            for event in self.seen:
                if isinstance(event, kind) and where(event):
                    self.seen.remove(event)
                    return event
            assert time.monotonic() < end, f"no {kind.__name__}; got {self.seen}"
            self.io.wait(0.05)

    def quiet(self, seconds: float) -> list[Event]:
        """Everything that is there or arrives in the next `seconds`."""
        time.sleep(seconds)
        self.seen.extend(self.io.drain())
        return self.seen


class FakeRouter:
    """One ROUTER socket that records envelopes and says what a test tells it to."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", incarnation: str = "r1") -> None:
        self.context = context
        self.keys: ClusterKeys | None = None
        self.incarnation = incarnation
        self.open("tcp://127.0.0.1:*")

    def open(self, address: str) -> None:
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        if self.keys is not None:
            self.socket.curve_server = 1
            self.socket.curve_secretkey = self.keys.curve_secret
            self.socket.curve_publickey = self.keys.curve_public
        try:
            self.socket.bind(address)
        except zmq.ZMQError:
            self.socket.close()
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.got: list[Envelope[ToRouter]] = []
        self.node_id = b""
        self.numbers = itertools.count(1)

    def restart(self, incarnation: str) -> None:
        """The same address, another process."""
        self.socket.close(0)
        self.incarnation = incarnation
        end = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(zmq.ZMQError):
                self.open(self.address)
                return
            assert time.monotonic() < end
            time.sleep(0.01)

    def receive(self, timeout_s: float = PATIENCE_S) -> Envelope[ToRouter] | None:
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        self.node_id, payload = self.socket.recv_multipart()
        envelope = decode_to_router(payload)
        self.got.append(envelope)
        return envelope

    def await_body(self, kind: type[ToRouter]) -> Envelope[ToRouter]:
        """The next message of a kind; others are recorded and passed over."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            envelope = self.receive(0.2)
            if envelope is not None and isinstance(envelope.body, kind):
                return envelope
        raise AssertionError(f"no {kind}; got {self.got[-5:]}")

    def say(self, body: ToNode, *, to: str, skip: int = 0, source: str | None = None) -> None:
        """Send the next message; `skip` numbers get lost before it."""
        for _ in range(skip):
            next(self.numbers)
        envelope = Envelope(source or self.incarnation, to, next(self.numbers), body)
        self.socket.send_multipart([self.node_id, encode(envelope)])

    def welcome(self, *, reset: bool = False) -> Hello:
        """Wait for a Hello and answer it, with numbers from 1."""
        hello = self.await_body(Hello)
        self.numbers = itertools.count(1)
        self.say(Welcome(reset=reset), to=hello.source)
        self.await_body(Heartbeat)
        assert isinstance(hello.body, Hello)
        return hello.body


def settings(*routers: str, **changes: Any) -> IOSettings:
    defaults = {
        "heartbeat_s": HEARTBEAT_S,
        "router_timeout_s": SILENCE_S,
        "peer_timeout_s": SILENCE_S,
        "stuck_engine_s": 0.3,
        "admin_timeout_s": 0.5,
    }
    return IOSettings(routers=routers, **{**defaults, **changes})


def identity(role: DisaggregationMode, incarnation: str) -> NodeIdentity:
    return NodeIdentity(role=role, name=incarnation, incarnation=incarnation, pid=os.getpid())


@contextlib.contextmanager
def prefill(
    *routers: str, incarnation: str = "p1", side_channel_port: int = 0, **changes: Any
) -> Iterator[Engine]:
    """A started prefill node's I/O."""
    who = identity(DisaggregationMode.PREFILL, incarnation)
    io = NodeIO(who, settings(*routers, **changes), PeerServer(side_channel_port))
    io.start()
    try:
        yield Engine(io)
    finally:
        io.close()


@contextlib.contextmanager
def decode(*routers: str, incarnation: str = "d1", **changes: Any) -> Iterator[Engine]:
    """A started decode node's I/O."""
    who = identity(DisaggregationMode.DECODE, incarnation)
    io = NodeIO(who, settings(*routers, **changes), PeerDialler(lease_s=10.0))
    io.start()
    try:
        yield Engine(io)
    finally:
        io.close()
