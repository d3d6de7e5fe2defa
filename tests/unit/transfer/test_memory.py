"""What the in-process twin can do beyond the contract: every fault of a network, repeatably."""

import numpy as np
import pytest

from common.plan import (
    AddPeer,
    Notified,
    PeerAdded,
    PeerFailed,
    RemovePeer,
    RenewLease,
    TransferEvent,
    WriteDone,
    WriteFailed,
)
from tests.unit.transfer.rig import PAGE_BYTES, Pages, filled_pool, write
from transfer.memory import Faults, MemoryFabric, MemoryTransfer


class Net:
    """A source and a target whose only clock is `fabric.step`."""

    def __init__(self, faults: Faults, seed: int = 0) -> None:
        self.now = 0.0
        self.fabric = MemoryFabric(seed, faults, auto_step=False)
        self.pools = {name: filled_pool(index) for index, name in enumerate(("source", "target"))}
        self.source = self.add("source", self.pools["source"])
        self.target = self.add("target", self.pools["target"])
        self.source.submit([AddPeer("target", self.target.memories), RenewLease("target", 100.0)])
        assert self.source.poll() == [PeerAdded("target")]

    def add(self, name: str, pool: Pages) -> MemoryTransfer:
        return MemoryTransfer(
            self.fabric, pool.reshape(-1).data, PAGE_BYTES, name, clock=lambda: self.now
        )

    def run(self, steps: int) -> tuple[list[TransferEvent], list[TransferEvent]]:
        """What source and target see over some steps."""
        seen: tuple[list[TransferEvent], list[TransferEvent]] = ([], [])
        for _ in range(steps):
            self.fabric.step()
            seen[0].extend(self.source.poll())
            seen[1].extend(self.target.poll())
        return seen


def test_nothing_lands_without_a_step() -> None:
    net = Net(Faults())
    net.source.submit([write(1, "target")])
    assert net.source.poll() == []
    assert net.target.poll() == []
    assert net.run(1) == ([WriteDone(1, 0, PAGE_BYTES, 0.0)], [Notified(b"1/0")])


def test_delay_is_bounded_and_reorders() -> None:
    net = Net(Faults(delay=(2, 9)))
    net.source.submit([write(room, "target", (room,)) for room in range(1, 17)])
    assert net.run(1) == ([], [])
    _, target_events = net.run(8)
    order = [event.payload for event in target_events if isinstance(event, Notified)]
    assert len(order) == 16
    assert order != sorted(order, key=lambda payload: int(payload.split(b"/")[0]))


def test_a_delayed_write_fills_its_pages_bit_by_bit() -> None:
    net = Net(Faults(delay=(6, 6)))
    before = net.pools["target"].copy()
    pages = tuple(range(4))
    net.source.submit([write(1, "target", pages)])
    net.run(3)
    changed = [bool((net.pools["target"][page] != before[page]).any()) for page in pages]
    assert 0 < sum(changed) < 4
    net.run(3)
    assert (net.pools["target"][:4] == net.pools["source"][:4]).all()


def test_the_same_seed_repeats_everything() -> None:
    faults = Faults(delay=(0, 5), failure=0.1, hang=0.1, lost_acknowledgement=0.1)

    def history(seed: int) -> tuple[list[TransferEvent], list[TransferEvent], bytes]:
        net = Net(faults, seed)
        net.source.submit([write(room, "target", (room, room + 20)) for room in range(20)])
        return *net.run(10), net.pools["target"].tobytes()

    assert history(3) == history(3)
    assert history(3) != history(4)


def test_a_hung_write_lands_later_although_its_peer_was_forgotten() -> None:
    net = Net(Faults(hang=1.0))
    before = net.pools["target"][5].copy()
    net.source.submit([write(1, "target", (5,)), RemovePeer("target")])
    assert net.run(20) == ([], [])
    assert (net.pools["target"][5] == before).all()
    net.now = 1000.0
    assert net.fabric.land_hung() == 1
    assert net.run(1) == ([WriteDone(1, 0, PAGE_BYTES, 1000.0)], [Notified(b"1/0")])
    assert (net.pools["target"][5] == net.pools["source"][5]).all()


def test_a_failed_write_breaks_the_link_once_and_never_notifies() -> None:
    net = Net(Faults(failure=1.0))
    net.source.submit([write(1, "target", (1, 2)), write(2, "target", (3, 4))])
    source_events, target_events = net.run(5)
    assert target_events == []
    failed = [event.room for event in source_events if isinstance(event, WriteFailed)]
    assert sorted(failed) == [1, 2]
    assert sum(isinstance(event, PeerFailed) for event in source_events) == 1
    net.fabric.faults = Faults()
    net.source.submit([AddPeer("target", net.target.memories), RenewLease("target", 100.0)])
    net.source.submit([write(3, "target")])
    assert net.run(1)[1] == [Notified(b"3/0")]


def test_a_lost_acknowledgement_is_a_failure_whose_bytes_landed() -> None:
    net = Net(Faults(lost_acknowledgement=1.0))
    net.source.submit([write(1, "target", (7,))])
    source_events, target_events = net.run(1)
    assert target_events == [Notified(b"1/0")]
    assert [type(event) for event in source_events] == [WriteFailed, PeerFailed]
    assert (net.pools["target"][7] == net.pools["source"][7]).all()


@pytest.mark.parametrize("victim", ["source", "target"])
def test_a_killed_process_moves_no_byte_any_more(victim: str) -> None:
    net = Net(Faults(delay=(3, 3)))
    net.source.submit([write(1, "target", (1, 2, 3))])
    net.run(1)
    net.fabric.kill(f"pdserve-{victim}")
    frozen = net.pools["target"].copy()
    source_events, target_events = net.run(6)
    assert (net.pools["target"] == frozen).all()
    assert target_events == []
    expected = [] if victim == "source" else [WriteFailed, PeerFailed]
    assert [type(event) for event in source_events] == expected
    assert net.fabric.num_flights == 0


def test_polls_alone_move_things_and_wake_until_all_has_landed() -> None:
    fabric = MemoryFabric(0, Faults(delay=(5, 5)))
    pools = [np.zeros((4, PAGE_BYTES), np.uint8), np.ones((4, PAGE_BYTES), np.uint8)]
    source, target = (
        MemoryTransfer(fabric, pool.reshape(-1).data, PAGE_BYTES, name)
        for pool, name in zip(pools, "ab", strict=True)
    )
    wakes = [0, 0]

    def bell(index: int) -> None:
        wakes[index] += 1

    source.start(lambda: bell(0))
    target.start(lambda: bell(1))
    source.submit([AddPeer("b", target.memories), RenewLease("b", 1e18), write(1, "b")])
    polls, events = 0, []
    while wakes[0]:
        wakes[0] = 0
        polls += 1
        events += source.poll()
    assert polls >= 5
    assert [type(event) for event in events] == [PeerAdded, WriteDone]
    assert wakes[1] == 1
    assert target.poll() == [Notified(b"1/0")]


def test_a_pool_that_is_no_whole_number_of_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="not writable pages"):
        MemoryTransfer(MemoryFabric(), memoryview(bytearray(PAGE_BYTES + 1)), PAGE_BYTES, "a")
