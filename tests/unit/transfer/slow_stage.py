"""A stage whose copies take time, host memory standing in for the device's."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Copy:
    """Moves one page at each question, in random order; whoever does not ask gets wrong bytes."""

    source: Pages
    target: Pages
    pairs: list[tuple[int, int]]
    heads: slice
    fails: bool = False

    def __call__(self) -> bool:
        if self.pairs:
            here, there = self.pairs.pop()
            self.target[there][:, :, self.heads] = self.source[here][:, :, self.heads]
        if self.fails:
            self.pairs.clear()
            raise RuntimeError("planted: the copy failed")
        return not self.pairs


@dataclass(eq=False)
class SlowStage:
    """A `PageStage` beside `pool` [pages, layers, 2, heads, ...]."""

    pool: Pages
    num_slots: int = 16
    broken: bool = False
    """What is begun from now on is refused."""
    failing: bool = False
    """What is begun from now on fails in the middle."""
    copies: list[Copy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.num_slots)
        self.ring = np.random.default_rng(7).integers(
            0, 256, (self.num_slots, *self.pool.shape[1:]), dtype=np.uint8
        )

    @property
    def buffer(self) -> memoryview:
        return self.ring.reshape(-1).data

    @property
    def address(self) -> int:
        return self.ring.ctypes.data

    def fetch(self, pages: Sequence[int], slots: Sequence[int]) -> Copy:
        return self._begin(self.pool, self.ring, pages, slots, slice(None))

    def put(self, slots: Sequence[int], pages: Sequence[int], first: int, count: int) -> Copy:
        return self._begin(self.ring, self.pool, slots, pages, slice(first, first + count))

    @property
    def busy_slots(self) -> set[int]:
        """Those that a copy still reads or writes."""
        incoming = {
            slot for copy in self.copies if copy.target is self.ring for _, slot in copy.pairs
        }
        outgoing = {
            slot for copy in self.copies if copy.source is self.ring for slot, _ in copy.pairs
        }
        return incoming | outgoing

    @property
    def pages_being_read(self) -> set[int]:
        return {page for copy in self.copies if copy.source is self.pool for page, _ in copy.pairs}

    def finish(self) -> None:
        for copy in self.copies:
            while copy.pairs and not copy.fails and not copy():
                pass

    def _begin(
        self, source: Pages, target: Pages, here: Sequence[int], there: Sequence[int], heads: slice
    ) -> Copy:
        if self.broken:
            raise RuntimeError("planted: no copies today")
        pairs = list(zip(here, there, strict=True))
        self.draw.shuffle(pairs)
        self.copies = [copy for copy in self.copies if copy.pairs]
        slots = set(there if target is self.ring else here)
        assert slots.isdisjoint(self.busy_slots), "a slot in two copies at a time"
        self.copies.append(Copy(source, target, pairs, heads, self.failing))
        return self.copies[-1]
