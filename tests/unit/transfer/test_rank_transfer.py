"""A rank in another process: all that is said passes the channel; of a dead one nothing is said."""

import multiprocessing
import os
import socket

import pytest

from common.plan import (
    AddPeer,
    ExpectWrites,
    PeerAdded,
    PeerFailed,
    PieceLanded,
    RemovePeer,
    RenewLease,
    TransferEvent,
    WriteDone,
    WriteFailed,
)
from common.rank_channel import RankChannel
from tests.unit.transfer.rig import (
    HALVES,
    LONG,
    WHOLE,
    MemoryRig,
    Side,
    behind_channel,
    write,
)
from transfer.base import TransferBackend
from transfer.memory import Faults, MemoryTransfer
from transfer.rank_transfer import RemoteTransfer, serve_transfer
from transfer.sharded import ShardedTransfer


class Cut(RankChannel):
    """A channel whose other process dies when the test says so."""

    def die(self) -> None:
        with socket.socket(fileno=os.dup(self._connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)


def remote(backend: TransferBackend) -> tuple[RemoteTransfer, Cut]:
    """Another rank, and the end of its channel in its own process."""
    ours, theirs = (Cut(end) for end in multiprocessing.Pipe())
    (memory,) = backend.memories
    made = RemoteTransfer(ours, memory)
    serve_transfer(theirs, backend)
    for channel in (ours, theirs):
        channel.start(lambda: None)
    return made, theirs


def halves(rig: MemoryRig, name: str, seed: int) -> tuple[Side, list[TransferBackend]]:
    """A side of two ranks, and their backends."""
    side = rig.side(name, seed)
    return side, list(side.transfer._backends)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dies", ["source", "target"])
def test_nothing_is_told_of_a_rank_that_died(dies: str) -> None:
    """The node ends then; until it does, it says nothing that may not be so."""
    rig = MemoryRig(HALVES, HALVES)
    rig.fabric.auto_step = False
    sides, lines = {}, {}
    for seed, name in enumerate(("source", "target")):
        side, (first, second) = halves(rig, name, seed)
        if name == dies:
            far, lines[name] = remote(second)
            side.transfer = ShardedTransfer([first, far], name)
            side.transfer.start(side.wake)
        sides[name] = side
    source, target = sides["source"], sides["target"]
    rig.connect(source, target)
    rig.fabric.faults = Faults(delay=(3, 3))
    source.transfer.submit([write(1, "target", (1, 2))])
    rig.until(lambda: rig.fabric.num_flights == 2)
    lines[dies].die()
    rig.fabric.kill(f"pdserve-{dies}-rank1")
    for _ in range(8):
        rig.fabric.step()
        rig.pump()
    rig.settle(0.05)
    assert target.notified == []
    assert target.events == [PieceLanded(b"1/0")]
    if dies == "source":
        assert source.ends_of(1) == [], "its other half may have landed, or not"
        source.transfer.submit([write(2, "target"), RemovePeer("target")])
    else:
        assert [type(end) for end in source.ends_of(1)] == [WriteFailed]
    rig.settle(0.05)
    assert target.notified == []


def test_close_does_not_wait_for_a_rank_that_is_gone() -> None:
    rig = MemoryRig(HALVES, WHOLE)
    side, (first, second) = halves(rig, "source", 1)
    far, line = remote(second)
    side.transfer = ShardedTransfer([first, far], "source")
    line.die()
    with pytest.raises(AssertionError, match="not reached"):
        rig.until(lambda: False, timeout_s=0.05)
    side.transfer.close()
    side.transfer.submit([write(1, "target")])
    assert [type(event) for event in side.transfer.poll()] == [WriteFailed]


def test_close_waits_so_long_for_a_rank_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transfer.rank_transfer.CLOSE_S", 0.05)
    ours, theirs = (RankChannel(end) for end in multiprocessing.Pipe())
    (memory,) = MemoryRig().side("source").transfer.memories
    far = RemoteTransfer(ours, memory)
    ours.start(lambda: None)
    far.submit([write(1, "target")])
    far.close()
    assert "have no known end" in caplog.text
    assert far.poll() == [], "nobody said how the write ended"
    far.submit([write(2, "target")])
    assert [type(event) for event in far.poll()] == [WriteFailed]
    del theirs


def test_a_bug_in_a_rank_is_not_survived_there() -> None:
    class Broken(MemoryTransfer):
        def submit(self, commands: object) -> None:
            raise RuntimeError("planted")

    rig = MemoryRig()
    backend = Broken(rig.fabric, memoryview(bytearray(4096)), 4096, "r")
    ours, theirs = (RankChannel(end) for end in multiprocessing.Pipe())
    failed: list[bool] = []
    far = RemoteTransfer(ours, backend.memories[0])
    serve_transfer(theirs, backend, lambda: failed.append(True))
    theirs.start(lambda: None)
    far.submit([ExpectWrites(True)])
    rig.until(lambda: bool(failed))


def test_a_rank_in_another_process_keeps_the_contract() -> None:
    """All commands and events pass the channel as they are."""
    rig = MemoryRig(WHOLE, WHOLE)
    source, target = rig.side("source", 1), rig.side("target", 2)
    (backend,) = source.transfer._backends  # type: ignore[attr-defined]
    far = behind_channel(backend)
    woken: list[int] = []
    far.start(lambda: woken.append(1))
    far.submit([ExpectWrites(True), AddPeer("target", target.transfer.memories)])
    far.submit([write(1, "target"), RenewLease("target", rig.clock() + LONG)])
    far.submit([write(2, "target"), AddPeer("nobody", ()), RemovePeer("target")])
    seen: list[TransferEvent] = []

    def all_told() -> bool:
        seen.extend(far.poll())
        return len(seen) == 4

    rig.until(all_told)
    assert {type(event) for event in seen} == {PeerAdded, WriteFailed, WriteDone, PeerFailed}
    assert woken
    far.close()
    rig.close()
