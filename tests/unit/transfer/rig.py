"""Two nodes' pools and whatever backend connects them: the same handful of moves for all backends.

A node has one pool, or several ranks with some KV heads of each page; tests see whole pages.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from common.messages import PeerMemory
from common.plan import (
    AddPeer,
    Notified,
    PeerAdded,
    RenewLease,
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from common.rank_channel import RankChannel
from tests.unit.transfer.slow_stage import SlowStage
from transfer.base import TransferBackend
from transfer.courier import Fence
from transfer.head_ranges import HeadRange, cut
from transfer.memory import MemoryFabric, MemoryTransfer
from transfer.nixl import NixlTransfer
from transfer.rank_transfer import RemoteTransfer, serve_transfer
from transfer.sharded import ShardedTransfer

NUM_LAYERS = 2
NUM_HEADS = 4
TILE_BYTES = 256
"""One head's keys, or values, in one layer of a page."""
PAGE_BYTES = NUM_LAYERS * 2 * NUM_HEADS * TILE_BYTES
NUM_PAGES = 64
LONG = 3600.0
TIMEOUT_S = 60.0

Pages = npt.NDArray[np.uint8]
"""[pages, PAGE_BYTES]."""
Ranges = tuple[tuple[int, int], ...]
"""(first head, number of heads) of each rank."""

WHOLE: Ranges = ((0, 4),)
HALVES: Ranges = ((0, 2), (2, 2))
UNEVEN: Ranges = ((0, 2), (2, 1), (3, 1))
REPLICAS: Ranges = ((0, 4), (0, 4))


def filled_pool(seed: int, num_pages: int = NUM_PAGES) -> Pages:
    """[num_pages, PAGE_BYTES] of random bytes."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (num_pages, PAGE_BYTES), dtype=np.uint8)


class Pool:
    """A node's pages, whole to who looks at them and cut into the ranks' pools underneath."""

    def __init__(self, content: Pages, ranges: Ranges) -> None:
        self.ranges = ranges
        by_head = content.reshape(len(content), NUM_LAYERS, 2, NUM_HEADS, TILE_BYTES)
        self.ranks = [by_head[:, :, :, f : f + n].copy() for f, n in ranges]
        """[pages, NUM_LAYERS, 2, that rank's heads, TILE_BYTES] each."""

    def copy(self) -> Pages:
        """Whole pages, and a check that replicas hold the same."""
        shape = len(self.ranks[0]), NUM_LAYERS, 2, NUM_HEADS, TILE_BYTES
        whole, is_set = np.zeros(shape, np.uint8), [False] * NUM_HEADS
        for (first, count), part in zip(self.ranges, self.ranks, strict=True):
            place = whole[:, :, :, first : first + count]
            assert not is_set[first] or (place == part).all(), "replicas differ"
            place[:] = part
            is_set[first : first + count] = [True] * count
        assert all(is_set)
        return whole.reshape(len(whole), PAGE_BYTES)

    def __getitem__(self, pages: Any) -> Pages:
        found: Pages = self.copy()[pages]
        return found

    def __setitem__(self, pages: slice, content: Any) -> None:
        whole = self.copy()
        whole[pages] = content
        for part, new in zip(self.ranks, Pool(whole, self.ranges).ranks, strict=True):
            part[:] = new


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

    @property
    def notified(self) -> list[bytes]:
        return [event.payload for event in self.events if isinstance(event, Notified)]

    def ends_of(self, room: int) -> list[WriteDone | WriteFailed]:
        ends = [e for e in self.events if isinstance(e, WriteDone | WriteFailed)]
        return [e for e in ends if e.room == room]


class Rig:
    """Makes sides, and the moves between them. `source`, `target`: the ranks of sides so named."""

    def __init__(
        self,
        source: Ranges = WHOLE,
        target: Ranges = WHOLE,
        *,
        channels: bool = False,
        staged: str = "",
        fence: Fence | None = None,
    ) -> None:
        self.ranges = {"source": source, "target": target}
        self.staged = staged
        """Names the sides whose pages go through host memory."""
        self.fence = fence
        self.stages: list[SlowStage] = []
        self.channels = channels
        """Ranks other than the first are reached as those of other processes are."""
        self.clock_offset = 0.0
        self.sides: list[Side] = []

    @property
    def bytes_sent_a_page(self) -> int:
        """From source to target; each replica gets its own."""
        pieces = cut(*([HeadRange(*heads) for heads in self.ranges[n]] for n in self.ranges))
        return sum(piece.heads.count for piece in pieces) * PAGE_BYTES // NUM_HEADS

    def clock(self) -> float:
        return time.monotonic() + self.clock_offset

    def backend(self, part: npt.NDArray[np.uint8], name: str, first_head: int) -> TransferBackend:
        """Of one rank, over [pages, NUM_LAYERS, 2, its heads, TILE_BYTES]."""
        raise NotImplementedError

    def stage(self, part: npt.NDArray[np.uint8], name: str) -> SlowStage | None:
        """Of one rank, if its side stages."""
        if name.partition("-")[0] not in self.staged:
            return None
        self.stages.append(SlowStage(part))
        return self.stages[-1]

    def side(self, incarnation: str, seed: int = 0) -> Side:
        """`incarnation` begins with `source` or `target`."""
        ranges = self.ranges[incarnation.partition("-")[0]]
        pool = Pool(filled_pool(seed), ranges)
        backends = [
            self.backend(part, f"{incarnation}-rank{rank}", first)
            for rank, (part, (first, _)) in enumerate(zip(pool.ranks, ranges, strict=True))
        ]
        if self.channels:
            backends[1:] = [behind_channel(backend) for backend in backends[1:]]
        return self.started(incarnation, ShardedTransfer(backends, incarnation), pool)

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
        add = AddPeer(target.incarnation, target.transfer.memories)
        renew = RenewLease(target.incarnation, self.clock() + lease_s)
        source.transfer.submit([add, renew])
        self.until(lambda: source.events.count(PeerAdded(target.incarnation)) > before)

    def close(self) -> None:
        for side in self.sides:
            side.transfer.close()


class MemoryRig(Rig):
    def __init__(self, *ranges: Ranges, **settings: Any) -> None:
        super().__init__(*ranges, **settings)
        self.fabric = MemoryFabric(seed=1)

    def backend(self, part: npt.NDArray[np.uint8], name: str, first_head: int) -> TransferBackend:
        return MemoryTransfer(
            self.fabric,
            part.reshape(-1).data,
            part[0].nbytes,
            name,
            self.clock,
            num_layers=NUM_LAYERS,
            first_head=first_head,
            num_heads=part.shape[3],
            fence=self.fence,
            stage=self.stage(part, name),
        )


class NixlRig(Rig):
    def backend(self, part: npt.NDArray[np.uint8], name: str, first_head: int) -> TransferBackend:
        return NixlTransfer(
            part.ctypes.data,
            len(part),
            part[0].nbytes,
            name,
            {},
            num_layers=NUM_LAYERS,
            first_head=first_head,
            num_heads=part.shape[3],
            clock=self.clock,
            fence=self.fence,
            stage=self.stage(part, name),
        )


def behind_channel(backend: TransferBackend) -> RemoteTransfer:
    """Another rank's backend as rank 0 has it, with all that lies between two processes."""
    ours, theirs = (RankChannel(end) for end in multiprocessing.Pipe())
    (memory,) = backend.memories
    remote = RemoteTransfer(ours, memory)
    serve_transfer(theirs, backend)
    for channel in (ours, theirs):
        channel.start(lambda: None)
    return remote


def damaged(memories: Sequence[PeerMemory], last: PeerMemory) -> tuple[PeerMemory, ...]:
    """The same but for the last rank's."""
    return (*memories[:-1], last)


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
