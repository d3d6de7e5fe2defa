"""The contract of `transfer.base`, kept by both libraries and between nodes of any ranks."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from common.plan import (
    AddPeer,
    Notified,
    PeerAdded,
    PeerFailed,
    RemovePeer,
    RenewLease,
    WriteDone,
    WriteFailed,
)
from tests.unit.transfer.rig import (
    HALVES,
    NUM_PAGES,
    PAGE_BYTES,
    REPLICAS,
    UNEVEN,
    WHOLE,
    MemoryRig,
    NixlRig,
    Rig,
    Side,
    damaged,
    filled_pool,
    write,
)

RANKS = {
    "1 to 1": (WHOLE, WHOLE),
    "1 to 2": (WHOLE, HALVES),
    "2 to 1": (HALVES, WHOLE),
    "2 to 2": (HALVES, HALVES),
    "2 to 3": (HALVES, UNEVEN),
    "replicas": (REPLICAS, REPLICAS),
}
BOTH = "source and target"
Case = tuple[type[Rig], str, dict[str, Any]]
CASES: list[Case] = [(kind, ranks, {}) for kind in (MemoryRig, NixlRig) for ranks in RANKS]
CASES += [(MemoryRig, "2 to 3", {"channels": True}), (NixlRig, "2 to 2", {"channels": True})]
CASES += [(MemoryRig, "1 to 1", {"staged": who}) for who in ("source", "target", BOTH)]
CASES += [(MemoryRig, ranks, {"staged": BOTH}) for ranks in ("2 to 3", "replicas")]
CASES += [(NixlRig, "1 to 1", {"staged": who}) for who in ("source", "target", BOTH)]
CASES += [(NixlRig, "2 to 1", {"staged": BOTH})]


def case_name(case: Case) -> str:
    kind, ranks, settings = case
    return " ".join([kind.__name__, ranks, *(f"{key} {settings[key]}" for key in settings)])


@pytest.fixture(params=CASES, ids=case_name)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    kind, ranks, settings = request.param
    made: Rig = kind(*RANKS[ranks], **settings)
    yield made
    made.close()


@pytest.fixture
def source(rig: Rig) -> Side:
    return rig.side("source", seed=1)


@pytest.fixture
def target(rig: Rig) -> Side:
    return rig.side("target", seed=2)


def test_pages_arrive_before_their_notification(rig: Rig, source: Side, target: Side) -> None:
    rig.connect(source, target)
    untouched = target.pool.copy()
    source.transfer.submit([write(7, "target", (1, 5, 2), (10, 3, 40))])

    def arrived() -> bool:
        if Notified(b"7/0") not in target.events:
            return False
        assert (target.pool[[10, 3, 40]] == source.pool[[1, 5, 2]]).all()
        return True

    rig.until(arrived)
    rig.until(lambda: bool(source.ends_of(7)))
    end = source.ends_of(7)[0]
    assert isinstance(end, WriteDone)
    assert (end.chunk, end.num_bytes) == (0, 3 * rig.bytes_sent_a_page)
    assert 0 <= end.seconds < 20
    others = [page for page in range(NUM_PAGES) if page not in (10, 3, 40)]
    assert (target.pool[others] == untouched[others]).all()
    assert source.wakes > 0
    assert target.wakes > 0


def test_many_writes_end_once_each_and_notify_once(rig: Rig, source: Side, target: Side) -> None:
    rig.connect(source, target)
    rooms = range(100, 100 + NUM_PAGES)
    source.transfer.submit(
        [write(room, "target", (room - 100,), (NUM_PAGES - 1 - room + 100,)) for room in rooms]
    )
    rig.until(lambda: all(source.ends_of(room) for room in rooms))
    rig.until(lambda: len(target.notified) >= len(rooms))
    rig.settle(0.05)
    assert [len(source.ends_of(room)) for room in rooms] == [1] * len(rooms)
    assert all(isinstance(source.ends_of(room)[0], WriteDone) for room in rooms)
    assert sorted(target.notified) == sorted(f"{room}/0".encode() for room in rooms)
    assert (target.pool[::-1] == source.pool[:]).all()


def test_both_sides_may_write(rig: Rig, source: Side, target: Side) -> None:
    rig.connect(source, target)
    rig.connect(target, source)
    source.transfer.submit([write(1, "target", (0, 1))])
    target.transfer.submit([write(2, "source", (8, 9))])
    rig.until(lambda: Notified(b"1/0") in target.events and Notified(b"2/0") in source.events)
    assert (target.pool[:2] == source.pool[:2]).all()
    assert (target.pool[8:10] == source.pool[8:10]).all()


def test_write_to_an_unknown_peer_fails(rig: Rig, source: Side) -> None:
    source.transfer.submit([write(1, "nobody"), RenewLease("nobody", 1e18), RemovePeer("nobody")])
    rig.until(lambda: bool(source.ends_of(1)))
    rig.settle(0.05)
    assert source.events == [WriteFailed(1, 0, "the peer is unknown")]


@pytest.mark.parametrize("lease", ["never given", "over", "over while the peer was away"])
def test_nothing_is_posted_without_a_lease(
    rig: Rig, source: Side, target: Side, lease: str
) -> None:
    before = target.pool.copy()
    add = AddPeer("target", target.transfer.memories)
    match lease:
        case "never given":
            source.transfer.submit([add])
        case "over":
            source.transfer.submit([add, RenewLease("target", rig.clock() + 5)])
            rig.until(lambda: PeerAdded("target") in source.events)
            rig.clock_offset += 6
        case _:
            renew = RenewLease("target", rig.clock() + 100)
            source.transfer.submit([add, renew, RemovePeer("target"), add])
    source.transfer.submit([write(1, "target")])
    rig.until(lambda: bool(source.ends_of(1)))
    rig.settle(0.05)
    assert source.ends_of(1) == [WriteFailed(1, 0, "the peer's lease is over")]
    assert target.events == []
    assert (target.pool[:] == before).all()
    source.transfer.submit([RenewLease("target", rig.clock() + 100), write(2, "target")])
    rig.until(lambda: Notified(b"2/0") in target.events)


@pytest.mark.parametrize(
    ("source_pages", "target_pages"),
    [
        ((), ()),
        ((1, 2), (3,)),
        ((NUM_PAGES,), (0,)),
        ((-1,), (0,)),
        ((0,), (NUM_PAGES,)),
        ((0,), (-1,)),
        ((0, 1), (2, 2)),
    ],
)
def test_wrong_page_ids_fail_the_write_alone(
    rig: Rig,
    source: Side,
    target: Side,
    source_pages: tuple[int, ...],
    target_pages: tuple[int, ...],
) -> None:
    rig.connect(source, target)
    before = target.pool.copy()
    bad = write(1, "target", source_pages, target_pages)
    source.transfer.submit([bad, write(2, "target", (9,))])
    rig.until(lambda: bool(source.ends_of(1) and source.ends_of(2)))
    assert isinstance(source.ends_of(1)[0], WriteFailed)
    assert isinstance(source.ends_of(2)[0], WriteDone)
    others = [page for page in range(NUM_PAGES) if page != 9]
    assert (target.pool[others] == before[others]).all()
    assert not any(isinstance(event, PeerFailed) for event in source.events)


def test_adding_a_known_peer_again_changes_nothing(rig: Rig, source: Side, target: Side) -> None:
    rig.connect(source, target)
    again = AddPeer("target", target.transfer.memories)
    source.transfer.submit([again, write(1, "target"), again])
    rig.until(lambda: source.events.count(PeerAdded("target")) == 3)
    rig.until(lambda: bool(source.ends_of(1)))
    assert isinstance(source.ends_of(1)[0], WriteDone)


def test_posted_writes_of_a_removed_peer_end_and_it_can_return(
    rig: Rig, source: Side, target: Side
) -> None:
    rig.connect(source, target)
    source.transfer.submit(
        [
            write(1, "target", tuple(range(32))),
            RemovePeer("target"),
            write(2, "target"),
            AddPeer("target", target.transfer.memories),
            RenewLease("target", rig.clock() + 100),
            write(3, "target", (50,)),
        ]
    )
    rig.until(lambda: all(source.ends_of(room) for room in (1, 2, 3)))
    rig.settle(0.05)
    assert [len(source.ends_of(room)) for room in (1, 2, 3)] == [1, 1, 1]
    assert isinstance(source.ends_of(1)[0], WriteDone)
    assert source.ends_of(2) == [WriteFailed(2, 0, "the peer is unknown")]
    assert isinstance(source.ends_of(3)[0], WriteDone)
    assert source.events.count(PeerAdded("target")) == 2
    assert not any(isinstance(event, PeerFailed) for event in source.events)


def test_dead_peer_fails_once_and_its_next_incarnation_works(
    rig: Rig, source: Side, target: Side
) -> None:
    rig.connect(source, target)
    source.transfer.submit([write(1, "target")])
    rig.until(lambda: bool(source.ends_of(1)))
    target.transfer.close()
    source.transfer.submit([write(room, "target", (room,)) for room in range(2, 6)])
    rig.until(lambda: all(source.ends_of(room) for room in range(2, 6)))
    rig.settle(0.1)
    for room in range(2, 6):
        assert len(source.ends_of(room)) == 1
        assert isinstance(source.ends_of(room)[0], WriteFailed)
    failures = [event for event in source.events if isinstance(event, PeerFailed)]
    assert [failure.peer for failure in failures] == ["target"]
    restarted = rig.side("target-2", seed=3)
    rig.connect(source, restarted)
    source.transfer.submit([write(9, "target-2", (4, 5)), write(10, "target")])
    rig.until(lambda: Notified(b"9/0") in restarted.events)
    rig.until(lambda: bool(source.ends_of(10)))
    assert (restarted.pool[4:6] == source.pool[4:6]).all()
    assert source.ends_of(10) == [WriteFailed(10, 0, "the peer is unknown")]


def test_close_ends_every_write_and_later_ones_fail(rig: Rig, source: Side, target: Side) -> None:
    rig.connect(source, target)
    rooms = range(1, 21)
    source.transfer.submit([write(room, "target", tuple(range(48))) for room in rooms])
    source.transfer.close()
    source.transfer.close()
    source.transfer.submit([write(99, "target")])
    rig.settle(0.05)
    for room in (*rooms, 99):
        assert len(source.ends_of(room)) == 1
    assert isinstance(source.ends_of(99)[0], WriteFailed)
    settled = target.pool.copy()
    source.pool[:] = 0
    rig.settle(0.05)
    assert (target.pool[:] == settled).all()


def test_nothing_of_the_pool_is_read_after_done(rig: Rig, source: Side, target: Side) -> None:
    rig.connect(source, target)
    for turn in range(20):
        source.pool[:] = filled_pool(100 + turn)
        expected = source.pool[:16].copy()
        source.transfer.submit([write(turn + 1, "target", tuple(range(16)))])
        rig.until(lambda room=turn + 1: bool(source.ends_of(room)))  # type: ignore[misc]
        source.pool[:] = 0
        rig.until(lambda n=turn + 1: len(target.notified) == n)  # type: ignore[misc]
        assert (target.pool[:16] == expected).all()


@pytest.mark.parametrize(
    "damage",
    [
        {"metadata": b""},
        {"metadata": b"\x00" * 400},
        {"metadata": b"garbage that is no agent at all" * 9},
        {"agent_name": "pdserve-somebody-else"},
        {"page_bytes": PAGE_BYTES * 2},
        {"num_pages": 0},
        {"num_pages": 1 << 40},
        {"base_address": 0},
    ],
    ids=",".join,
)
def test_damaged_peer_memory_fails_that_peer_alone(
    rig: Rig, source: Side, target: Side, damage: dict[str, object]
) -> None:
    memories = target.transfer.memories
    bad = msgspec.structs.replace(memories[-1], **damage)
    source.transfer.submit([AddPeer("target", damaged(memories, bad))])
    rig.until(lambda: bool(source.events))
    assert [type(event) for event in source.events] == [PeerFailed]
    rig.connect(source, target)
    source.transfer.submit([write(1, "target")])
    rig.until(lambda: Notified(b"1/0") in target.events)


def test_truncated_metadata_does_not_poison_the_peer(rig: Rig, source: Side, target: Side) -> None:
    memories = target.transfer.memories
    metadata = memories[-1].metadata
    cuts = [
        msgspec.structs.replace(memories[-1], metadata=metadata[:length])
        for length in range(1, len(metadata), 7)
    ]
    for number, cut in enumerate(cuts, 1):
        source.transfer.submit([AddPeer("target", damaged(memories, cut))])
        rig.until(lambda n=number: len(source.events) == n)  # type: ignore[misc]
    assert all(isinstance(event, PeerFailed) for event in source.events)
    rig.connect(source, target)
    source.transfer.submit([write(1, "target")])
    rig.until(lambda: Notified(b"1/0") in target.events)


def test_one_agent_name_is_one_peer(rig: Rig, source: Side, target: Side) -> None:
    rig.connect(source, target)
    source.transfer.submit([AddPeer("impostor", target.transfer.memories), write(1, "target")])
    rig.until(lambda: bool(source.ends_of(1)))
    assert isinstance(source.ends_of(1)[0], WriteDone)
    assert any(isinstance(e, PeerFailed) and e.peer == "impostor" for e in source.events)
