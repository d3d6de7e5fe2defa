"""Pages through host memory: bounds, back-pressure, and what becomes of everything that breaks."""

import pytest

from common.plan import (
    AddPeer,
    PeerAdded,
    PeerFailed,
    RemovePeer,
    RenewLease,
    WriteDone,
    WriteFailed,
)
from tests.unit.transfer.rig import PAGE_BYTES, write
from tests.unit.transfer.staged_net import LEASE_S, Net, Node, pages_equal
from transfer.landing import GRANT_S
from transfer.memory import Faults
from transfer.slots import Direction

MANY = tuple(range(40))
"""More pages than a ring has slots."""
OUT, IN = Direction.OUTGOING, Direction.INCOMING


def linked(net: Net, *, source: bool = True, target: bool = True) -> tuple[Node, Node]:
    """Two nodes, of which those named stage."""
    sides = net.add("source", staged=source), net.add("target", staged=target)
    net.link(*sides)
    return sides


def failed(node: Node, room: int) -> str:
    end = node.ends[room]
    assert isinstance(end, WriteFailed)
    return end.error


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("source_stages", [False, True])
@pytest.mark.parametrize("target_stages", [False, True])
def test_more_pages_than_slots(source_stages: bool, target_stages: bool) -> None:
    net = Net(Faults(delay=(0, 3)))
    source, target = linked(net, source=source_stages, target=target_stages)
    untouched = target.pool[40:].copy()
    there = tuple(reversed(MANY))
    source.transfer.submit([write(1, "target", MANY, there)])
    most = 0
    while not (target.notified and source.ends):
        net.step()
        assert net.now < 100
        for node in (source, target):
            held = [node.held(way) for way in Direction] if node.stage else []
            assert all(count <= 12 for count in held), "no more than three quarters"
            most = max([most, *held])
    assert most > 2 or not (source_stages or target_stages), "pieces overlap"
    assert target.notified == [b"1/0"]
    end = source.ends[1]
    assert isinstance(end, WriteDone)
    assert end.num_bytes == 40 * PAGE_BYTES
    assert 0 < end.seconds < 100
    assert pages_equal(source, MANY, target, there)
    assert (target.pool[40:] == untouched).all()
    net.until_quiet()


def test_said_only_when_every_page_is_in_its_place() -> None:
    net = Net(Faults(delay=(0, 9)), seed=3)
    source, target = linked(net)
    rooms = {room: tuple(range(10 * room, 10 * room + 10)) for room in range(6)}
    source.transfer.submit([write(room, "target", pages) for room, pages in rooms.items()])
    while len(source.ends) < 6 or len(target.notified) < 6:
        net.step()
        assert net.now < 100
        for payload in target.notified:
            pages = rooms[int(payload.split(b"/")[0])]
            assert pages_equal(source, pages, target, pages)
        for room, end in source.ends.items():
            assert isinstance(end, WriteDone)
            assert pages_equal(source, rooms[room], target, rooms[room]), "done before it was"


def test_a_stopped_peer_leaves_slots_for_others() -> None:
    net = Net()
    source, stopped, other = net.add("source"), net.add("stopped"), net.add("other")
    net.link(source, stopped)
    net.link(source, other)
    source.transfer.submit([write(room, "stopped", MANY) for room in range(1, 9)])
    net.step(50, without=stopped)
    assert 0 < source.held(OUT) <= 6, "half of what may be outgoing"
    source.transfer.submit([write(room, "other", MANY) for room in range(11, 14)])
    net.step(400, without=stopped)
    assert set(source.ends) == {11, 12, 13}
    assert len(other.notified) == 3
    net.until_quiet()
    assert len(stopped.notified) == 8
    assert all(isinstance(end, WriteDone) for end in source.ends.values())


def test_both_write_at_once_through_small_rings() -> None:
    net = Net(Faults(delay=(0, 2)))
    left, right = net.add("left", num_slots=8), net.add("right", num_slots=8)
    net.link(left, right)
    net.link(right, left)
    low, high = tuple(range(32)), tuple(range(32, 64))
    left.transfer.submit([write(room, "right", low, high) for room in range(1, 6)])
    right.transfer.submit([write(room, "left", low, high) for room in range(1, 6)])
    net.until_quiet(5000)
    assert len(left.notified) == len(right.notified) == 5
    assert pages_equal(left, low, right, high)
    assert pages_equal(right, low, left, high)


def test_a_ring_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 pages, not 7"):
        Net().add("source", num_slots=7)


# ---------------------------------------------------------------- peers and leases


def test_a_write_that_waits_for_slots_fails_with_its_lease() -> None:
    net = Net()
    source, target = net.add("source"), net.add("target")
    net.link(source, target, lease_s=0.5)
    source.transfer.submit([write(room, "target", MANY) for room in (1, 2, 3)])
    net.step(60, without=target)
    assert {failed(source, room) for room in (1, 2, 3)} == {"the peer's lease is over"}
    before = target.pool.copy()
    net.step(50)
    assert target.notified == []
    assert (target.pool == before).all()
    assert source.held(OUT) == target.held(IN) == 0, "what was granted is given back"
    source.transfer.submit([RenewLease("target", net.now + 100), write(4, "target", MANY)])
    net.until_quiet()
    assert target.notified == [b"4/0"]


def test_a_lease_that_ends_in_the_moment_of_posting_gives_slots_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Net()
    source, target = net.add("source"), net.add("target")
    net.link(source, target, lease_s=0.5)
    poster = source.staging._sender.poster
    monkeypatch.setattr(poster, "may_post", lambda name: True)
    source.transfer.submit([write(1, "target", (1, 2))])
    while not target.held(IN):
        net.step()
    net.now += 1
    net.step(10)
    assert failed(source, 1) == "the peer's lease is over"
    assert source.held(OUT) == target.held(IN) == 0
    assert target.notified == []


def test_a_write_in_the_middle_fails_with_its_lease_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while others have all slots."""
    net = Net()
    source, target = net.add("source"), net.add("target")
    net.link(source, target, lease_s=0.5)
    source.transfer.submit([write(1, "target", MANY)])
    net.step(2)
    monkeypatch.setattr(source.slots, "take", lambda way, count: None)
    net.step(30)
    assert source.held(OUT) == 0, "what had begun is there"
    assert source.ends == {}
    net.step(20)
    assert failed(source, 1) == "the peer's lease is over"


def test_pages_are_not_read_once_their_write_has_ended() -> None:
    """Neither is a slot used again: the stage sees to that."""
    net = Net()
    source, target = net.add("source"), net.add("target")
    net.link(source, target, lease_s=0.05)
    assert source.stage is not None
    source.transfer.submit(
        [write(room, "target", tuple(range(8 * room, 8 * room + 8))) for room in range(8)]
    )
    for turn in range(20):
        net.step(without=target)
        for room in set(source.ends) & set(range(8)):
            pages = set(range(8 * room, 8 * room + 8))
            assert pages.isdisjoint(source.stage.pages_being_read)
        source.transfer.submit([write(100 + turn, "target", (60, 61))])
    assert set(range(8)) <= set(source.ends)


def test_a_renewed_lease_reaches_writes_that_wait() -> None:
    net = Net()
    source, target = net.add("source"), net.add("target")
    net.link(source, target, lease_s=0.5)
    source.transfer.submit([write(room, "target", MANY) for room in (1, 2, 3)])
    for _ in range(20):
        net.step(10, without=target)
        source.transfer.submit([RenewLease("target", net.now + 0.5)])
    for _ in range(100):
        net.step(10)
        source.transfer.submit([RenewLease("target", net.now + 0.5)])
    assert len(target.notified) == 3


def test_what_follows_a_removal_waits_for_the_writes_before_it() -> None:
    net = Net(Faults(delay=(3, 3)))
    source, target = linked(net)
    source.transfer.submit(
        [
            write(1, "target", MANY),
            RemovePeer("target"),
            RenewLease("target", LEASE_S),
            write(2, "target"),
            AddPeer("target", target.transfer.memories),
            write(3, "target"),
            RenewLease("target", LEASE_S),
            write(4, "target", (50,)),
        ]
    )
    net.until_quiet()
    assert isinstance(source.ends[1], WriteDone)
    assert failed(source, 2) == "the peer is unknown"
    assert failed(source, 3) == "the peer's lease is over"
    assert isinstance(source.ends[4], WriteDone)
    assert source.events.count(PeerAdded("target")) == 2


# ---------------------------------------------------------------- what breaks


@pytest.mark.parametrize("source_stages", [False, True])
@pytest.mark.parametrize("steps", range(1, 30, 2))
def test_a_peer_that_dies_ends_every_write_once(source_stages: bool, steps: int) -> None:
    """In whatever phase its pieces are."""
    net = Net(Faults(delay=(1, 4)), seed=steps)
    source, target = linked(net, source=source_stages)
    source.transfer.submit([write(room, "target", MANY) for room in (1, 2)])
    net.step(steps)
    net.fabric.kill("pdserve-target")
    net.nodes.remove(target)
    net.until_quiet()
    assert set(source.ends) == {1, 2}
    assert isinstance(source.ends[2], WriteFailed)
    assert [type(event) for event in source.events].count(PeerFailed) == 1
    source.transfer.submit([write(3, "target")])
    net.step(2)
    assert failed(source, 3) == "the peer is unknown"
    again = net.add("target-2")
    net.link(source, again)
    source.transfer.submit([write(4, "target-2", MANY)])
    net.until_quiet()
    assert pages_equal(source, MANY, again, MANY)
    if source_stages:
        assert source.held(OUT) == 0


@pytest.mark.parametrize("steps", range(1, 30, 2))
def test_a_sender_that_dies_leaves_the_receiver_serving(steps: int) -> None:
    """Its slots come back when its pages are given to somebody else, or after a while."""
    net = Net(Faults(delay=(1, 4)), seed=steps)
    source, target = linked(net)
    source.transfer.submit([write(1, "target", MANY)])
    net.step(steps)
    net.fabric.kill("pdserve-source")
    net.nodes.remove(source)
    net.step(30)
    again = net.add("source-2")
    net.link(again, target)
    again.transfer.submit([write(2, "target", MANY)])
    net.until_quiet()
    assert b"2/0" in target.notified
    assert pages_equal(again, MANY, target, MANY)
    assert target.held(IN) == 0


def test_slots_of_a_dead_sender_come_back_in_time() -> None:
    net = Net()
    source, target = linked(net)
    source.transfer.submit([write(1, "target", MANY)])
    while not target.held(IN):
        net.step()
    net.fabric.kill("pdserve-source")
    net.nodes.remove(source)
    net.step(100)
    assert target.held(IN) > 0
    net.now += GRANT_S
    net.step()
    assert target.held(IN) == 0


def test_a_question_that_was_lost_is_asked_again() -> None:
    net = Net()
    source, target = linked(net)
    net.fabric.faults = Faults(failure=1.0)
    source.transfer.submit([write(1, "target", (1, 2))])
    net.fabric.faults = Faults()
    net.step(50)
    assert source.ends == {}
    net.step(60)
    assert isinstance(source.ends[1], WriteDone)
    assert target.notified == [b"1/0"]


@pytest.mark.parametrize("how", ["broken", "failing"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_copies_that_fail_end_their_write_alone(how: str, side: str) -> None:
    net = Net()
    source, target = linked(net)
    stage = {"source": source, "target": target}[side].stage
    assert stage is not None
    setattr(stage, how, True)
    source.transfer.submit([write(1, "target", MANY)])
    for _ in range(300):
        net.step()
        if source.ends:
            break
    setattr(stage, how, False)
    reason = {"source": "could not copy to the stage", "target": "could not take it in"}[side]
    assert reason in failed(source, 1)
    assert target.notified == []
    net.until_quiet()
    source.transfer.submit([write(2, "target", MANY)])
    net.until_quiet()
    assert target.notified == [b"2/0"]
    assert pages_equal(source, MANY, target, MANY)
    assert not any(isinstance(event, PeerFailed) for event in source.events)
    assert source.held(OUT) == target.held(IN) == 0


@pytest.mark.parametrize("steps", range(1, 20, 3))
def test_close_ends_everything_and_leaves_no_copy_running(steps: int) -> None:
    net = Net(Faults(delay=(1, 3)), seed=steps)
    source, target = linked(net)
    source.transfer.submit([write(room, "target", MANY) for room in (1, 2)])
    net.step(steps)
    for node in (target, source):
        node.transfer.close()
        assert node.stage is not None
        assert not any(copy.pairs for copy in node.stage.copies)
    net.step(5)
    assert {type(end) for end in source.ends.values()} == {WriteFailed}
    assert set(source.ends) == {1, 2}
