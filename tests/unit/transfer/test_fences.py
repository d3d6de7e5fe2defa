"""A write is posted only after what fills its pages; others go on, and every write ends."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.plan import (
    AddPeer,
    Notified,
    PeerAdded,
    RemovePeer,
    RenewLease,
    TransferCommand,
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from tests.unit.transfer.rig import MemoryRig, NixlRig, Rig, Side, write
from tests.unit.transfer.test_poster import MEMORY, ScriptedAgent
from transfer.courier import Fenced, Ready, fenced
from transfer.fences import FencedCourier
from transfer.poster import Poster, WriteState

CLOSED = "this node's transfer is closed"


class Gate:
    """A fence that opens when the test says so, and counts how often it was set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.set = 0

    def __call__(self) -> Ready:
        self.set += 1
        return self.open.is_set


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture(params=[(MemoryRig, ""), (NixlRig, ""), (MemoryRig, "source and target")])
def rig(request: pytest.FixtureRequest, gate: Gate) -> Iterator[Rig]:
    kind, staged = request.param
    made: Rig = kind(fence=gate, staged=staged)
    yield made
    gate.open.set()
    made.close()


@pytest.fixture
def source(rig: Rig) -> Side:
    return rig.side("source", seed=1)


@pytest.fixture
def target(rig: Rig) -> Side:
    return rig.side("target", seed=2)


def test_nothing_is_posted_before_its_fence(
    rig: Rig, gate: Gate, source: Side, target: Side
) -> None:
    rig.connect(source, target)
    assert gate.set == 0, "a lease has nothing to wait for"
    before = target.pool.copy()
    source.transfer.submit([write(1, "target", (1, 2)), write(2, "target", (3,))])
    rig.settle(0.1)
    assert gate.set == 1
    assert source.ends_of(1) == source.ends_of(2) == []
    assert (target.pool.copy() == before).all()
    late = source.pool.copy()
    late[1:4] ^= 255
    source.pool[:] = late  # the kernels finish only now
    gate.open.set()
    rig.until(lambda: bool(source.ends_of(1) and source.ends_of(2)))
    rig.until(lambda: len(target.notified) == 2)
    assert (target.pool[1:4] == late[1:4]).all()


def test_a_write_that_waits_holds_up_its_own_peer_alone(
    rig: Rig, gate: Gate, source: Side, target: Side
) -> None:
    other = rig.side("target-2", seed=3)
    rig.connect(source, target)
    rig.connect(source, other)
    source.transfer.submit([write(1, "target", (1,))])
    blocked, gate.open = gate.open, threading.Event()
    gate.open.set()
    source.transfer.submit([write(2, "target", (2,)), write(3, "target-2", (3,))])
    rig.until(lambda: bool(source.ends_of(3)))
    rig.settle(0.05)
    assert isinstance(source.ends_of(3)[0], WriteDone)
    assert source.ends_of(1) == source.ends_of(2) == [], "in order, and the first is not ready"
    blocked.set()
    rig.until(lambda: bool(source.ends_of(1) and source.ends_of(2)))


def test_the_lease_is_read_behind_the_fence(
    rig: Rig, gate: Gate, source: Side, target: Side
) -> None:
    rig.connect(source, target, lease_s=5)
    source.transfer.submit([write(1, "target", (1,))])
    rig.settle(0.05)
    rig.clock_offset += 6
    gate.open.set()
    rig.until(lambda: bool(source.ends_of(1)))
    assert source.ends_of(1) == [WriteFailed(1, 0, "the peer's lease is over")]
    assert target.events == []


def test_a_lease_that_is_renewed_meanwhile_counts(
    rig: Rig, gate: Gate, source: Side, target: Side
) -> None:
    rig.connect(source, target, lease_s=5)
    source.transfer.submit([write(1, "target", (1,))])
    source.transfer.submit([RenewLease("target", rig.clock() + 100)])
    rig.settle(0.05)
    rig.clock_offset += 6
    gate.open.set()
    rig.until(lambda: Notified(b"1/0") in target.events)


def test_close_ends_what_never_became_ready(
    rig: Rig, gate: Gate, source: Side, target: Side
) -> None:
    rig.connect(source, target)
    before = target.pool.copy()
    source.transfer.submit([write(room, "target", (room,)) for room in range(1, 9)])
    rig.settle(0.05)
    began = time.monotonic()
    source.transfer.close()
    assert time.monotonic() - began < 2
    gate.open.set()
    rig.settle(0.1)
    for room in range(1, 9):
        assert source.ends_of(room) == [WriteFailed(room, 0, CLOSED)]
    assert (target.pool.copy() == before).all()


# ---------------------------------------------------------------- the courier by itself


def scripted() -> tuple[ScriptedAgent, FencedCourier]:
    agent = ScriptedAgent()
    courier = FencedCourier(Poster(agent, MEMORY, clock=lambda: 0.0))
    for command in (AddPeer("p", (MEMORY,)), RenewLease("p", 1.0)):
        courier.handle(command)
    assert courier.take_events() == [PeerAdded("p")]
    return agent, courier


def look(courier: FencedCourier) -> list[TransferEvent]:
    courier.progress()
    return courier.take_events()


def test_a_fence_that_fails_ends_its_writes_alone() -> None:
    agent, courier = scripted()

    def broken() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    courier.handle(Fenced(write(1, "p"), broken))
    courier.handle(Fenced(write(2, "p"), lambda: True))
    (failed,) = look(courier)
    assert isinstance(failed, WriteFailed)
    assert (failed.room, failed.chunk) == (1, 0)
    assert "illegal memory access" in failed.error
    assert agent.posted == [2]


def test_a_change_of_the_peer_waits_in_line_and_so_does_what_follows() -> None:
    agent, courier = scripted()
    ready: list[bool] = []
    courier.handle(Fenced(write(1, "p"), lambda: bool(ready)))
    for command in (RemovePeer("p"), AddPeer("p", (MEMORY,)), RenewLease("p", 1.0)):
        courier.handle(command)
    courier.handle(write(2, "p"))
    assert look(courier) == []
    assert courier.num_open == 5
    ready.append(True)
    agent.states[1] = WriteState.LANDED
    assert look(courier) == [WriteDone(1, 0, 16, 0.0), PeerAdded("p")]
    assert agent.posted == [2]


def test_without_a_fence_nothing_is_wrapped() -> None:
    commands: list[TransferCommand] = [write(1, "p"), RenewLease("p", 1.0)]
    assert fenced(commands, None) == commands


orders = st.lists(
    st.tuples(st.sampled_from("pqr"), st.integers(0, 3), st.booleans()), min_size=1, max_size=30
)


@given(orders)
def test_each_peers_writes_are_posted_in_order_and_never_before_their_fence(
    given_orders: list[tuple[str, int, bool]],
) -> None:
    """`fence` opens after so many rounds; some writes have none."""
    posted: list[tuple[str, int]] = []
    now = 0

    class Inner:
        num_open = 0
        expecting = False

        def handle(self, command: TransferCommand) -> None:
            assert isinstance(command, Write)
            posted.append((command.peer, command.room))
            opens = opens_at.get(command.room)
            assert opens is None or now >= opens, "before its fence"

        def progress(self) -> None: ...

        def take_events(self) -> list[TransferEvent]:
            return []

        def stop(self, reason: str) -> None: ...

        def abandon(self, reason: str) -> None: ...

    courier = FencedCourier(Inner())
    opens_at: dict[int, int] = {}

    def opened(at: int) -> Ready:
        return lambda: now >= at

    for room, (peer, wait, is_fenced) in enumerate(given_orders):
        command = write(room, peer)
        if is_fenced:
            opens_at[room] = now + wait
            courier.handle(Fenced(command, opened(now + wait)))
        else:
            courier.handle(command)
        now += room % 2
        courier.progress()
    now += 10
    courier.progress()
    assert courier.num_open == 0
    for name in "pqr":
        mine = [room for room, (peer, _, _) in enumerate(given_orders) if peer == name]
        assert [room for peer, room in posted if peer == name] == mine
