"""What a library may do that neither backend does on demand: the poster and its thread stand it."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
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
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from tests.unit.transfer.rig import write
from transfer.kept_peers import KeptPeers
from transfer.pacing import Pacing
from transfer.poster import ASKED_PER_ROUND, Look, Poster, WriteState
from transfer.threaded import ThreadedTransfer

MEMORY = PeerMemory(
    agent_name="agent",
    metadata=b"",
    base_address=4096,
    num_pages=8,
    page_bytes=16,
    first_head=0,
    num_heads=1,
)


@dataclass
class ScriptedAgent:
    """A write library that does as it is told and checks how it is used."""

    states: dict[int, WriteState] = field(default_factory=dict)
    """By room; POSTED if missing."""
    refuses: bool = False
    post_takes: threading.Event | None = None
    known: list[str] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)
    arrived: list[bytes] = field(default_factory=list)
    broken_looks: int = 0
    closed: bool = False
    notified: list[bytes] = field(default_factory=list)
    looked: list[int] = field(default_factory=list)

    def add_peer(self, memory: PeerMemory) -> None:
        if self.refuses:
            raise RuntimeError("no")
        assert memory.agent_name not in self.known
        self.known.append(memory.agent_name)

    def remove_peer(self, memory: PeerMemory) -> None:
        assert not self.posted, "removed under a posted write"
        self.known.remove(memory.agent_name)

    def post(self, memory: PeerMemory, write: Write) -> int:
        assert memory.agent_name in self.known
        if self.refuses:
            raise RuntimeError("no")
        if self.post_takes is not None:
            self.post_takes.wait(10)
        self.posted.append(write.room)
        return write.room

    def notify(self, memory: PeerMemory, payload: bytes) -> None:
        if self.refuses:
            raise RuntimeError("no")
        self.notified.append(payload)

    def look(self, memory: PeerMemory, boxes: Sequence[int]) -> int:
        if self.refuses:
            raise RuntimeError("no")
        self.posted.append(-1)
        self.looked = [10 * box for box in boxes]
        return -1

    def words(self, handle: int) -> Sequence[int]:
        return self.looked

    def state(self, handle: int) -> WriteState:
        assert handle in self.posted, "asked after its final answer"
        state = self.states.get(handle, WriteState.POSTED)
        if state is not WriteState.POSTED:
            self.posted.remove(handle)
        return state

    def error(self, handle: int) -> str:
        return f"broke {handle}"

    def notifications(self) -> list[bytes]:
        if self.broken_looks:
            self.broken_looks -= 1
            raise RuntimeError("planted: no looks today")
        arrived, self.arrived = self.arrived, []
        return arrived

    def close(self) -> None:
        self.closed = True


def linked() -> tuple[ScriptedAgent, Poster[int]]:
    agent = ScriptedAgent()
    poster = Poster(agent, MEMORY, clock=lambda: 0.0)
    poster.handle(AddPeer("p", (MEMORY,)))
    poster.handle(RenewLease("p", 1.0))
    assert poster.take_events() == [PeerAdded("p")]
    return agent, poster


def look(poster: Poster[int]) -> list[TransferEvent]:
    poster.progress()
    return poster.take_events()


def test_siblings_of_a_broken_write_keep_the_peer_until_they_ended() -> None:
    agent, poster = linked()
    for room in (1, 2, 3):
        poster.handle(write(room, "p"))
    agent.states[2] = WriteState.BROKEN
    assert look(poster) == [WriteFailed(2, 0, "broke 2"), PeerFailed("p", "broke 2")]
    assert agent.known == ["agent"]
    poster.handle(write(4, "p"))
    assert poster.take_events() == [WriteFailed(4, 0, "the peer is unknown")]
    agent.states[1] = WriteState.BROKEN
    assert look(poster) == [WriteFailed(1, 0, "broke 1")]
    agent.states[3] = WriteState.LANDED
    assert look(poster) == [WriteDone(3, 0, 16, 0.0)]
    assert agent.known == []


def test_a_returning_peer_waits_for_its_old_writes() -> None:
    agent, poster = linked()
    poster.handle(write(1, "p"))
    poster.handle(RemovePeer("p"))
    for command in (AddPeer("p", (MEMORY,)), write(2, "p"), RenewLease("p", 1.0), write(3, "p")):
        poster.handle(command)
    assert look(poster) == []
    agent.states[1] = WriteState.LANDED
    assert look(poster) == [
        WriteDone(1, 0, 16, 0.0),
        PeerAdded("p"),
        WriteFailed(2, 0, "the peer's lease is over"),
    ]
    assert agent.posted == [3]


def test_changed_memory_starts_the_peer_over() -> None:
    agent, poster = linked()
    poster.handle(write(1, "p"))
    moved = msgspec.structs.replace(MEMORY, base_address=8192)
    poster.handle(AddPeer("p", (moved,)))
    assert poster.take_events() == []
    agent.states[1] = WriteState.LANDED
    assert look(poster) == [WriteDone(1, 0, 16, 0.0), PeerAdded("p")]
    poster.handle(write(2, "p"))
    assert poster.take_events() == [WriteFailed(2, 0, "the peer's lease is over")]


def test_a_refused_post_ends_the_write_and_the_link() -> None:
    agent, poster = linked()
    agent.refuses = True
    poster.handle(write(1, "p"))
    why = "RuntimeError: no"
    assert poster.take_events() == [WriteFailed(1, 0, why), PeerFailed("p", why)]
    assert agent.known == []
    poster.handle(AddPeer("p", (MEMORY,)))
    assert poster.take_events() == [PeerFailed("p", why)]


def test_an_unbroken_peer_that_left_is_found_again() -> None:
    agent, poster = linked()
    poster.handle(RemovePeer("p"))
    poster.handle(write(1, "p"))
    assert poster.take_events() == [WriteFailed(1, 0, "the peer is unknown")]
    agent.refuses = True  # to load it a second time would fail
    poster.handle(AddPeer("p", (MEMORY,)))
    assert poster.take_events() == [PeerAdded("p")]


def test_a_new_lease_is_needed_after_every_return() -> None:
    _, poster = linked()
    poster.handle(RemovePeer("p"))
    poster.handle(AddPeer("p", (MEMORY,)))
    poster.handle(write(1, "p"))
    over = WriteFailed(1, 0, "the peer's lease is over")
    assert poster.take_events() == [PeerAdded("p"), over]


def test_a_broken_peer_is_loaded_anew() -> None:
    agent, poster = linked()
    poster.handle(write(1, "p"))
    agent.states[1] = WriteState.BROKEN
    look(poster)
    assert agent.known == []
    poster.handle(AddPeer("p", (MEMORY,)))
    assert agent.known == ["agent"]


def test_what_is_kept_of_peers_that_left_is_bounded() -> None:
    agent = ScriptedAgent()
    peers = KeptPeers(agent, limit=2)
    memories = [msgspec.structs.replace(MEMORY, agent_name=name) for name in "abcd"]
    for memory in memories:
        peers.add(memory)
        peers.leave(memory, broken=False)
    assert agent.known == ["c", "d"]
    peers.add(memories[2])  # in use again, so it is not the next to go
    peers.add(memories[0])
    peers.leave(memories[0], broken=False)
    assert agent.known == ["c", "d", "a"]


def test_every_posted_write_gets_its_turn() -> None:
    agent, poster = linked()
    rooms = range(1, 3 * ASKED_PER_ROUND)
    for room in rooms:
        poster.handle(write(room, "p"))
    agent.states[rooms[-1]] = WriteState.LANDED
    seen = [look(poster) for _ in range(3)]
    assert seen == [[], [], [WriteDone(rooms[-1], 0, 16, 0.0)]]
    agent.states = dict.fromkeys(rooms, WriteState.LANDED)
    ended = [event for _ in range(3) for event in look(poster)]
    assert len(ended) == len(rooms) - 1
    assert poster.num_open == 0


def test_a_look_tells_what_stands_there_and_breaks_like_a_write() -> None:
    agent, poster = linked()
    assert poster.look(Look("p", (3, 5)))
    assert poster.num_open == 1
    agent.states[-1] = WriteState.LANDED
    assert look(poster) == []
    assert poster.take_looks() == [(Look("p", (3, 5)), [30, 50])]
    assert poster.take_looks() == []
    agent.states[-1] = WriteState.BROKEN
    assert poster.look(Look("p", (3,)))
    assert look(poster) == [PeerFailed("p", "broke -1")]
    assert agent.known == []
    assert not poster.look(Look("p", (3,))), "nobody is there"
    assert not poster.may_post("p")


def test_a_notification_that_cannot_be_sent_loses_the_peer() -> None:
    agent, poster = linked()
    poster.notify("p", b"hello")
    assert agent.notified == [b"hello"]
    poster.notify("nobody", b"hello")
    agent.refuses = True
    poster.notify("p", b"hello")
    assert poster.take_events() == [PeerFailed("p", "RuntimeError: no")]


def test_a_peer_that_leaves_waits_for_its_looks() -> None:
    agent, poster = linked()
    poster.look(Look("p", (1,)))
    poster.handle(RemovePeer("p"))
    poster.handle(AddPeer("p", (MEMORY,)))
    poster.notify("p", b"to nobody")
    assert look(poster) == []
    agent.states[-1] = WriteState.LANDED
    assert look(poster) == [PeerAdded("p")]
    assert agent.notified == []


def test_abandoning_ends_posted_and_waiting_writes() -> None:
    _, poster = linked()
    for command in (write(1, "p"), RemovePeer("p"), AddPeer("p", (MEMORY,)), write(2, "p")):
        poster.handle(command)
    poster.abandon("closed")
    assert poster.take_events() == [WriteFailed(1, 0, "closed"), WriteFailed(2, 0, "closed")]
    assert poster.num_open == 0


def threaded(agent: ScriptedAgent) -> ThreadedTransfer[int]:
    transfer = ThreadedTransfer(agent, MEMORY, lambda: 0.0, Pacing())
    transfer.start(lambda: None)
    transfer.submit([AddPeer("p", (MEMORY,)), RenewLease("p", 1.0)])
    assert events_of(transfer, 1) == [PeerAdded("p")]
    return transfer


def events_of(transfer: ThreadedTransfer[int], count: int) -> list[TransferEvent]:
    events: list[TransferEvent] = []
    deadline = time.monotonic() + 5
    while len(events) < count and time.monotonic() < deadline:
        events += transfer.poll()
        time.sleep(0.001)
    return events


def test_submit_and_poll_return_at_once_while_a_post_blocks() -> None:
    agent = ScriptedAgent(post_takes=threading.Event())
    transfer = threaded(agent)
    before = time.monotonic()
    transfer.submit([write(room, "p", (room,)) for room in range(5)])
    assert transfer.poll() == []
    assert time.monotonic() - before < 0.5
    assert agent.post_takes is not None
    agent.states = dict.fromkeys(range(5), WriteState.LANDED)
    agent.post_takes.set()
    assert len(events_of(transfer, 5)) == 5
    transfer.close()


def test_writes_that_never_end_are_failed_by_close_after_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transfer.threaded.DRAIN_S", 0.05)
    agent = ScriptedAgent()
    transfer = threaded(agent)
    transfer.submit([write(1, "p")])
    deadline = time.monotonic() + 5
    while not agent.posted and time.monotonic() < deadline:
        time.sleep(0.001)
    transfer.close()
    assert agent.closed
    assert transfer.poll() == [WriteFailed(1, 0, "this node's transfer is closed")]


def test_a_failing_look_is_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transfer.threaded.FAULT_PAUSE_S", 0.01)
    agent = ScriptedAgent()
    transfer = threaded(agent)
    agent.broken_looks = 3
    agent.arrived = [b"late but here"]
    assert events_of(transfer, 1) == [Notified(b"late but here")]
    assert "a turn of the transfer thread failed" in caplog.text
    transfer.close()


def test_pace_follows_what_is_due() -> None:
    pacing = Pacing()
    assert pacing.pause_s(num_posted=1, expecting=True, quiet_s=0.001) == pacing.posted_s
    assert pacing.pause_s(num_posted=1, expecting=True, quiet_s=9) == pacing.slow_s
    assert pacing.pause_s(num_posted=0, expecting=True, quiet_s=9) == pacing.due_s
    assert pacing.pause_s(num_posted=0, expecting=False, quiet_s=0.1) == pacing.due_s
    assert pacing.pause_s(num_posted=0, expecting=False, quiet_s=9) == pacing.idle_s


def test_expecting_is_remembered() -> None:
    _, poster = linked()
    poster.handle(ExpectWrites(True))
    assert poster.expecting
    poster.handle(ExpectWrites(False))
    assert not poster.expecting
