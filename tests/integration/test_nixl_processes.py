"""NIXL between real processes that are killed and stopped in mid-transfer, by TCP and by default.

Each side is a process of its own that obeys a few verbs over a pipe. A receiver hashes the pages of
a write at the moment its notification arrives, so "bytes before notification" is checked there.
"""

import hashlib
import json
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import pytest

from common.messages import PeerMemory
from common.plan import (
    AddPeer,
    ExpectWrites,
    Notified,
    PeerAdded,
    PeerFailed,
    RemovePeer,
    RenewLease,
    TransferCommand,
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from transfer.nixl import NixlTransfer

PAGE_BYTES = 1 << 20
NUM_PAGES = 64
WRITES = 24
WARM_UP = 10_000
"""The first write's room, beyond those of the writes that a test is about."""
TIMEOUT_S = 60.0


def digest(pool: Any, pages: list[int]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(pool[pages]).data).hexdigest()


def live(pipe: Connection, incarnation: str, seed: int, environment: dict[str, str]) -> None:
    """One process: answer verbs, report every event, hash what has landed."""
    os.environ.update(environment)
    pool = np.random.default_rng(seed).integers(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
    transfer = NixlTransfer(
        pool.ctypes.data,
        NUM_PAGES,
        PAGE_BYTES,
        incarnation,
        {},
        num_layers=1,
        first_head=0,
        num_heads=1,
    )
    bell = os.eventfd(0)
    doomed = threading.Event()

    def wake() -> None:
        if doomed.is_set():
            os.kill(os.getpid(), signal.SIGKILL)
        os.eventfd_write(bell, 1)

    transfer.start(wake)
    pipe.send(transfer.memories)
    while True:
        ready, _, _ = select.select([pipe.fileno(), bell], [], [])
        if bell in ready:
            os.eventfd_read(bell)
            for event in transfer.poll():
                landed = json.loads(event.payload) if isinstance(event, Notified) else None
                pipe.send((event, digest(pool, landed["pages"]) if landed else None))
        if pipe.fileno() in ready:
            match pipe.recv():
                case "digest", pages:
                    pipe.send(digest(pool, pages))
                case "cpu", seconds:
                    before = time.process_time()
                    time.sleep(seconds)
                    pipe.send(time.process_time() - before)
                case "doom":
                    doomed.set()
                    pipe.send("")
                case "close":
                    before = time.monotonic()
                    transfer.close()
                    pipe.send((time.monotonic() - before, transfer.poll()))
                    return
                case commands:
                    transfer.submit(commands)


class Peer:
    """The test's hand on one process."""

    def __init__(self, incarnation: str, seed: int, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.incarnation = incarnation
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=live, args=(theirs, incarnation, seed, environment))
        self.process.start()
        theirs.close()
        self.by_tcp = environment.get("UCX_TLS") == "tcp"
        self.events: list[TransferEvent] = []
        self.landed: dict[int, str] = {}
        """Room -> digest of its target pages when its notification came."""
        self.memories: tuple[PeerMemory, ...] = self._receive()

    def _receive(self) -> Any:
        assert self.pipe.poll(TIMEOUT_S), f"{self.incarnation} says nothing; saw {self.events}"
        return self.pipe.recv()

    def pump(self) -> None:
        """Take in events that are there; a dead process has none."""
        try:
            while self.pipe.poll(0):
                self.take(self.pipe.recv())
        except (EOFError, ConnectionResetError):
            pass

    def take(self, message: tuple[TransferEvent, str | None]) -> None:
        event, landed = message
        self.events.append(event)
        if isinstance(event, Notified) and landed is not None:
            self.landed[json.loads(event.payload)["room"]] = landed

    def ask(self, *verb: Any) -> Any:
        """A verb's answer; events that come before it are kept."""
        self.pipe.send(verb if len(verb) > 1 else verb[0])
        while isinstance(answer := self._receive(), tuple) and not isinstance(answer[0], float):
            self.take(answer)
        return answer

    def submit(self, *commands: TransferCommand) -> None:
        self.pipe.send(list(commands))

    def ends(self, kind: type[WriteDone] | type[WriteFailed] | None = None) -> list[int]:
        """Rooms of the writes that ended (in one way), in order."""
        kinds = (WriteDone, WriteFailed) if kind is None else (kind,)
        return [e.room for e in self.events if isinstance(e, kinds)]

    def doom(self) -> None:
        """Let it kill itself, with SIGKILL, at its next event, so surely in mid-transfer."""
        self.ask("doom")

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


Start = Callable[[str, int], Peer]


@pytest.fixture(params=["default", "tcp"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    environment = {} if request.param == "default" else {"UCX_TLS": request.param}
    peers: list[Peer] = []

    def start_peer(incarnation: str, seed: int) -> Peer:
        peers.append(Peer(incarnation, seed, environment))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.end()


def until(reached: Callable[[], bool], *peers: Peer) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not reached():
        seen = {peer.incarnation: peer.events for peer in peers}
        assert time.monotonic() < deadline, f"not reached; saw {seen}"
        for peer in peers:
            peer.pump()
        time.sleep(0.0005)


def connect(source: Peer, target: Peer) -> None:
    source.submit(
        AddPeer(target.incarnation, target.memories),
        RenewLease(target.incarnation, time.monotonic() + 3600),
    )
    target.submit(ExpectWrites(True))
    until(lambda: PeerAdded(target.incarnation) in source.events, source)


def write(room: int, target: Peer, pages: range) -> Write:
    payload = json.dumps({"room": room, "pages": list(pages)}).encode()
    return Write(room, 0, target.incarnation, tuple(pages), tuple(pages), payload)


def pages_of(room: int) -> range:
    """16 MiB; rooms that follow each other differ."""
    return range(room % 4 * 16, room % 4 * 16 + 16)


def warm_up(source: Peer, target: Peer) -> list[str]:
    """Connect, send one room; the right digests, which repeat with every fourth room."""
    connect(source, target)
    post_many(source, target, range(WARM_UP, WARM_UP + 1))
    until(lambda: WARM_UP in target.landed and WARM_UP in source.ends(), source, target)
    return [source.ask("digest", list(pages_of(room))) for room in range(4)]


def post_many(source: Peer, target: Peer, rooms: range = range(WRITES)) -> None:
    source.submit(*(write(room, target, pages_of(room)) for room in rooms))


def post_until_one_fails(source: Peer, target: Peer) -> int:
    """How many writes were posted. There are always some on their way, so that a peer which dies
    dies in mid-transfer, however late a loaded machine lets it."""
    posted = 0

    def failed() -> bool:
        nonlocal posted
        due = range(posted, WRITES + len(source.ends()) - 1)
        if due:
            post_many(source, target, due)
            posted = due.stop
        return bool(source.ends(WriteFailed))

    until(failed, source)
    return posted


def assert_landed_right(target: Peer, right: list[str]) -> None:
    assert target.landed == {room: right[room % 4] for room in target.landed}


def test_killed_receiver_ends_every_write_and_a_new_one_is_served(start: Start) -> None:
    source, target = start("source", 1), start("target-1", 2)
    right = warm_up(source, target)
    target.doom()
    posted = post_until_one_fails(source, target)
    until(lambda: len(source.ends()) > posted, source)
    assert sorted(source.ends()) == [*range(posted), WARM_UP]
    assert_landed_right(target, right)
    restarted = start("target-2", 3)
    connect(source, restarted)
    post_many(source, restarted, range(20_003, 20_004))
    post_many(source, target, range(20_004, 20_005))
    until(lambda: 20_003 in restarted.landed and 20_004 in source.ends(), source, restarted)
    assert_landed_right(restarted, right)
    assert WriteFailed(20_004, 0, "the peer is unknown") in source.events
    failures = [event for event in source.events if isinstance(event, PeerFailed)]
    assert [failure.peer for failure in failures] == ["target-1"]


def test_killed_sender_leaves_the_receiver_serving(start: Start) -> None:
    source, target = start("source-1", 1), start("target", 2)
    right = warm_up(source, target)
    source.doom()
    post_many(source, target, range(10 * WRITES))  # so that its first event is not its last
    source.process.join()
    restarted = start("source-2", 3)
    target.pump()
    assert_landed_right(target, right)
    assert len(target.landed) <= 10 * WRITES, "the kill came after the last write"
    target.landed.clear()  # of the old rooms some may still be told
    right = warm_up(restarted, target)
    rooms = range(1000, 1000 + WRITES)
    post_many(restarted, target, rooms)
    until(lambda: len(restarted.ends(WriteDone)) == WRITES + 1, restarted, target)
    until(lambda: target.landed.keys() >= {*rooms}, restarted, target)
    assert all(target.landed[room] == right[room % 4] for room in rooms)


def test_stopped_receiver_holds_writes_until_it_goes_on(start: Start) -> None:
    source, target = start("source", 1), start("target", 2)
    right = warm_up(source, target)
    post_many(source, target)
    until(lambda: 0 in target.landed, source, target)
    target.signal(signal.SIGSTOP)
    source.submit(
        write(500, target, pages_of(500)),
        RemovePeer("target"),
        AddPeer("target", target.memories),
        RenewLease("target", time.monotonic() + 3600),
        write(501, target, pages_of(501)),
    )
    deadline = time.monotonic() + 1
    until(lambda: time.monotonic() > deadline, source)
    if source.by_tcp:  # the kernel may copy into a stopped process of the same host
        assert 500 not in source.ends()
        assert 501 not in source.ends()
    target.signal(signal.SIGCONT)
    until(lambda: {500, 501} <= set(source.ends()) and 501 in target.landed, source, target)
    assert sorted(source.ends(WriteDone)) == [*range(WRITES), 500, 501, WARM_UP]
    assert_landed_right(target, right)
    assert source.events.count(PeerAdded("target")) == 2


def test_close_beside_a_stopped_receiver_is_bounded(start: Start) -> None:
    source, target = start("source", 1), start("target", 2)
    warm_up(source, target)
    post_many(source, target)
    until(lambda: 0 in target.landed, source, target)
    target.signal(signal.SIGSTOP)
    source.submit(write(500, target, pages_of(500)))
    seconds, last_events = source.ask("close")
    source.events += last_events
    assert seconds < 8
    assert sorted(source.ends()) == [*range(WRITES), 500, WARM_UP]
    assert 500 in source.ends(WriteFailed if source.by_tcp else None)


def test_idle_connected_peers_use_next_to_nothing(start: Start) -> None:
    source, target = start("source", 1), start("target", 2)
    connect(source, target)
    source.submit(write(1, target, range(1)))
    until(lambda: 1 in target.landed, source, target)
    target.submit(ExpectWrites(False))
    time.sleep(0.5)
    assert source.ask("cpu", 1.5) / 1.5 < 0.02
    assert target.ask("cpu", 1.5) / 1.5 < 0.02


def test_links_that_come_and_go_leave_no_sockets_behind(start: Start) -> None:
    """A stopped process loses its links, and finds the same peers when it wakes up."""
    source, target = start("source", 1), start("target", 2)

    def sockets() -> list[int]:
        return [
            len(psutil.Process(peer.process.pid).net_connections("inet"))
            for peer in (source, target)
        ]

    counts = []
    for room in range(6):
        source.events.clear()
        connect(source, target)
        source.submit(write(room, target, range(1)))
        until(partial(target.landed.__contains__, room), source, target)
        source.submit(RemovePeer(target.incarnation))
        counts.append(sockets())
    assert counts == counts[:1] * len(counts)
