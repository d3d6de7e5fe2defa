"""Two pools and whatever backend connects them: the same handful of moves for both backends."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.plan import AddPeer, PeerAdded, RenewLease, TransferEvent, Write, WriteDone, WriteFailed
from transfer.base import TransferBackend
from transfer.memory import MemoryFabric, MemoryTransfer
from transfer.nixl import NixlTransfer

PAGE_BYTES = 4096
NUM_PAGES = 64
LONG = 3600.0
TIMEOUT_S = 20.0

Pool = npt.NDArray[np.uint8]


def filled_pool(seed: int, num_pages: int = NUM_PAGES) -> Pool:
    """[num_pages, PAGE_BYTES] of random bytes."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (num_pages, PAGE_BYTES), dtype=np.uint8)


@dataclass(eq=False)
class Side:
    """A backend, its pool, and everything its `poll` has said."""

    incarnation: str
    transfer: TransferBackend
    pool: Pool
    events: list[TransferEvent] = field(default_factory=list)
    wakes: int = 0

    def wake(self) -> None:
        self.wakes += 1

    def ends_of(self, room: int) -> list[WriteDone | WriteFailed]:
        ends = [e for e in self.events if isinstance(e, WriteDone | WriteFailed)]
        return [e for e in ends if e.room == room]


class Rig(Protocol):
    """Makes sides of one kind of backend."""

    clock_offset: float

    def side(self, incarnation: str, seed: int = 0) -> Side: ...

    def close(self) -> None: ...


class BaseRig:
    """The moves that do not depend on the backend."""

    def __init__(self) -> None:
        self.clock_offset = 0.0
        self.sides: list[Side] = []

    def clock(self) -> float:
        return time.monotonic() + self.clock_offset

    def started(self, incarnation: str, transfer: TransferBackend, pool: Pool) -> Side:
        side = Side(incarnation, transfer, pool)
        transfer.start(side.wake)
        self.sides.append(side)
        return side

    def pump(self) -> None:
        for side in self.sides:
            side.events += side.transfer.poll()

    def until(self, reached: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Poll all sides until `reached`; fails with everything that was seen."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            if time.monotonic() > deadline:
                seen = {side.incarnation: side.events for side in self.sides}
                raise AssertionError(f"not reached in {timeout_s} s; events: {seen}")
            self.pump()
            time.sleep(0.0005)

    def settle(self, seconds: float = 0.2) -> None:
        """Poll for a while: what should not happen gets its chance."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.pump()
            time.sleep(0.002)

    def connect(self, source: Side, target: Side, lease_s: float = LONG) -> None:
        """`source` may write into `target`."""
        before = source.events.count(PeerAdded(target.incarnation))
        add = AddPeer(target.incarnation, target.transfer.memory)
        renew = RenewLease(target.incarnation, self.clock() + lease_s)
        source.transfer.submit([add, renew])
        self.until(lambda: source.events.count(PeerAdded(target.incarnation)) > before)

    def close(self) -> None:
        for side in self.sides:
            side.transfer.close()


class MemoryRig(BaseRig):
    def __init__(self) -> None:
        super().__init__()
        self.fabric = MemoryFabric(seed=1)

    def side(self, incarnation: str, seed: int = 0) -> Side:
        pool = filled_pool(seed)
        transfer = MemoryTransfer(
            self.fabric, pool.reshape(-1).data, PAGE_BYTES, incarnation, self.clock
        )
        return self.started(incarnation, transfer, pool)


class NixlRig(BaseRig):
    def side(self, incarnation: str, seed: int = 0) -> Side:
        pool = filled_pool(seed)
        transfer = NixlTransfer(
            pool.ctypes.data, NUM_PAGES, PAGE_BYTES, incarnation, {}, clock=self.clock
        )
        return self.started(incarnation, transfer, pool)


def write(
    room: int,
    peer: str,
    source_pages: tuple[int, ...] = (0,),
    target_pages: tuple[int, ...] | None = None,
    chunk: int = 0,
) -> Write:
    """A write whose notification tells its room and chunk; into the same page ids by default."""
    targets = source_pages if target_pages is None else target_pages
    return Write(room, chunk, peer, source_pages, targets, f"{room}/{chunk}".encode())
