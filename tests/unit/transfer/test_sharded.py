"""What only a backend of several ranks can do wrong: half a landing, a break, an answer in part."""

import random
from collections.abc import Iterator

import msgspec
import pytest

from common.plan import (
    AddPeer,
    ExpectWrites,
    Notified,
    PeerAdded,
    PeerFailed,
    PieceLanded,
    PiecesDropped,
    RemovePeer,
    RenewLease,
    TransferEvent,
    WriteDone,
    WriteFailed,
)
from tests.unit.transfer.rig import (
    HALVES,
    LONG,
    UNEVEN,
    WHOLE,
    MemoryRig,
    Side,
    write,
)
from transfer.memory import Faults
from transfer.pieces import wrapped


@pytest.fixture
def rig() -> Iterator[MemoryRig]:
    """Two ranks write into three; time is `rig.fabric.step`."""
    made = MemoryRig(HALVES, UNEVEN)
    made.fabric.auto_step = False
    yield made
    made.close()


@pytest.fixture
def source(rig: MemoryRig) -> Side:
    return rig.side("source", seed=1)


@pytest.fixture
def target(rig: MemoryRig) -> Side:
    return rig.side("target", seed=2)


def step(rig: MemoryRig, steps: int = 1) -> None:
    for _ in range(steps):
        rig.fabric.step()
        rig.pump()


def agent(side: str, rank: int) -> str:
    return f"pdserve-{side}-rank{rank}"


def of(kind: type, events: list[TransferEvent]) -> list[TransferEvent]:
    return [event for event in events if isinstance(event, kind)]


def hang(rig: MemoryRig, source: Side, room: int, *, pieces: int) -> None:
    """Post a write of which the first `pieces` land and the others hang."""
    source.transfer.submit([write(room, "target", (1, 2))])
    for flight in rig.fabric._flights[pieces:]:
        flight.hangs = True


# ---------------------------------------------------------------- landings


def test_a_landing_is_told_with_its_last_piece_only(
    rig: MemoryRig, source: Side, target: Side
) -> None:
    rig.connect(source, target)
    hang(rig, source, 7, pieces=2)
    step(rig, 5)
    assert target.events == [PieceLanded(b"7/0")] * 2
    assert source.ends_of(7) == []
    assert rig.fabric.land_hung() == 1
    step(rig)
    assert target.notified == [b"7/0"]
    assert (target.pool[[1, 2]] == source.pool[[1, 2]]).all()
    (end,) = source.ends_of(7)
    assert isinstance(end, WriteDone)


def test_a_write_that_failed_in_part_ends_when_all_of_it_has(
    rig: MemoryRig, source: Side, target: Side
) -> None:
    rig.connect(source, target)
    rig.fabric.faults = Faults(delay=(2, 2))
    source.transfer.submit([write(7, "target", (1, 2))])
    first, *others = rig.fabric._flights
    first.fails = True
    for flight in others:
        flight.hangs = True
    step(rig, 9)
    assert [type(event) for event in source.events] == [PeerAdded, PeerFailed]
    assert source.ends_of(7) == []
    rig.fabric.land_hung()
    step(rig)
    (end,) = source.ends_of(7)
    assert isinstance(end, WriteFailed)
    assert "planted" in end.error
    assert target.notified == []


def test_pieces_of_a_source_that_is_gone_are_forgotten(
    rig: MemoryRig, source: Side, target: Side
) -> None:
    rig.connect(source, target)
    hang(rig, source, 7, pieces=2)
    step(rig)
    target.transfer.submit([RemovePeer("somebody else"), RemovePeer("source")])
    rig.fabric.land_hung()
    step(rig)
    assert target.events == [
        *[PieceLanded(b"7/0")] * 2,
        PiecesDropped(2),
        PieceLanded(b"7/0"),
    ]


def test_forged_and_repeated_pieces_land_nothing(
    rig: MemoryRig, source: Side, target: Side
) -> None:
    rig.connect(source, target)
    hang(rig, source, 7, pieces=2)
    step(rig)
    inbox = rig.fabric._endpoints[agent("target", 0)].inbox
    for payload in (
        wrapped(b"7/0", 0, 3, "source"),  # it came before
        wrapped(b"7/0", 2, 3, "elsewhere"),
        wrapped(b"7/0", 2, 4, "source"),
        wrapped(b"7/1", 2, 3, "source"),
    ):
        inbox.append(payload)
    rig.pump()
    assert target.notified == []
    assert of(PiecesDropped, target.events) == [PiecesDropped(1)]


# ---------------------------------------------------------------- peers


def test_a_break_on_one_rank_is_the_peers_once_and_it_can_return(
    rig: MemoryRig, source: Side, target: Side
) -> None:
    rig.connect(source, target)
    rig.fabric.faults = Faults(failure=1.0)
    source.transfer.submit([write(1, "target"), write(2, "target", (3,))])
    step(rig)
    rig.fabric.faults = Faults()
    again = AddPeer("target", target.transfer.memories)
    renew = RenewLease("target", rig.clock() + LONG)
    source.transfer.submit([write(3, "target"), again, renew, write(4, "target", (5,))])
    step(rig, 3)
    for room in (1, 2, 3):
        assert [type(end) for end in source.ends_of(room)] == [WriteFailed]
    assert len(of(PeerFailed, source.events)) == 1
    assert source.events.count(PeerAdded("target")) == 2
    assert target.notified == [b"4/0"]


def test_one_rank_that_cannot_be_reached_is_a_peer_that_cannot(
    rig: MemoryRig, source: Side, target: Side
) -> None:
    memories = target.transfer.memories
    gone = msgspec.structs.replace(memories[2], agent_name="nobody", metadata=b"memory:nobody")
    source.transfer.submit([AddPeer("target", (*memories[:2], gone)), write(1, "target")])
    rig.pump()
    assert PeerAdded("target") not in source.events
    assert len(of(PeerFailed, source.events)) == 1
    assert [type(end) for end in source.ends_of(1)] == [WriteFailed]
    rig.connect(source, target)
    source.transfer.submit([write(2, "target")])
    step(rig)
    assert target.notified == [b"2/0"]


def test_answers_that_a_forgotten_peer_is_owed_are_nobodys(
    rig: MemoryRig, source: Side, target: Side
) -> None:
    add = AddPeer("target", target.transfer.memories)
    remove = RemovePeer("target")
    source.transfer.submit([add, remove, add, remove, add, add])
    rig.pump()
    assert source.events == [PeerAdded("target")] * 2
    source.transfer.submit([RenewLease("target", rig.clock() + LONG), write(1, "target")])
    step(rig)
    assert target.notified == [b"1/0"]
    assert not source.transfer._owed  # type: ignore[attr-defined]


@pytest.mark.parametrize("order", ["rank first", "node first"])
def test_a_peer_named_like_another_peers_rank_gets_nothing_of_it(
    rig: MemoryRig, source: Side, target: Side, order: str
) -> None:
    """Names are what peers say of themselves."""
    whole = MemoryRig(WHOLE, WHOLE)
    whole.fabric = rig.fabric
    one, impostor = whole.side("source-2", seed=4), whole.side("target-2", seed=5)
    names = ["target/1", "target"] if order == "rank first" else ["target", "target/1"]
    memories = {"target": target.transfer.memories, "target/1": impostor.transfer.memories}
    one.transfer.submit([AddPeer(name, memories[name]) for name in names])
    whole.pump()
    assert [(type(e), e.peer) for e in one.events if isinstance(e, PeerAdded | PeerFailed)] == [
        (PeerFailed, names[1]),
        (PeerAdded, names[0]),
    ]
    whole.close()


def test_a_hint_reaches_every_rank(rig: MemoryRig, target: Side) -> None:
    target.transfer.submit([ExpectWrites(True)])
    assert all(
        backend._courier.expecting
        for backend in target.transfer._backends  # type: ignore[attr-defined]
    )


def test_ranks_that_hold_no_whole_model_make_no_backend() -> None:
    rig = MemoryRig(HALVES[1:], WHOLE)
    with pytest.raises(ValueError, match="no rank has KV head 0"):
        rig.side("source")


# ---------------------------------------------------------------- any order of faults


@pytest.mark.parametrize("seed", range(8))
def test_whatever_breaks_nothing_is_told_that_did_not_happen(seed: int) -> None:
    """Random faults on every piece, breaks and returns of the peer; all ends are told once."""
    chance = random.Random(seed)
    rig = MemoryRig(*chance.choice([(HALVES, UNEVEN), (WHOLE, UNEVEN), (UNEVEN, WHOLE)]))
    rig.fabric.auto_step = False
    source, target = rig.side("source", seed=1), rig.side("target", seed=2)
    rig.connect(source, target)
    add = AddPeer("target", target.transfer.memories)
    renew = RenewLease("target", rig.clock() + LONG)
    rig.fabric.faults = Faults(delay=(0, 6), failure=0.04, hang=0.05, lost_acknowledgement=0.04)
    room, checked = 0, 0
    for _ in range(150):
        if room < 60 and chance.random() < 0.6:
            room += 1
            source.transfer.submit([write(room, "target", (room,))])
        if chance.random() < 0.1:
            source.transfer.submit([RemovePeer("target"), add, renew])
        if source.events and isinstance(source.events[-1], PeerFailed):
            source.transfer.submit([add, renew])
        if chance.random() < 0.2:
            rig.fabric.land_hung()
        step(rig)
        for event in target.events[checked:]:
            if isinstance(event, Notified):
                page = int(event.payload.split(b"/")[0])
                assert (target.pool[page] == source.pool[page]).all()
        checked = len(target.events)
    rig.fabric.faults = Faults()
    rig.fabric.land_hung()
    step(rig, 12)
    assert [len(source.ends_of(n)) for n in range(1, room + 1)] == [1] * room
    done = {e.room for e in source.events if isinstance(e, WriteDone)}
    told = [int(payload.split(b"/")[0]) for payload in target.notified]
    assert len(told) == len(set(told))
    assert done <= set(told)
    assert done
    assert len(done) < room
    rig.close()
