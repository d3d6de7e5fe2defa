"""Who has which slots of the staging ring. Pure."""

from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto

LEAST_SLOTS = 8
"""Fewer would leave a direction hardly any."""


class Direction(Enum):
    OUTGOING = auto()
    INCOMING = auto()


class Slots:
    """Gives out slots of a ring.

    Neither direction ever has more than three quarters. What comes in leaves the ring without
    waiting for a peer; what goes out may wait for slots of a peer's ring. So two nodes that write
    to each other cannot both wait for what the other holds.
    """

    def __init__(self, count: int) -> None:
        if count < LEAST_SLOTS:
            raise ValueError(f"a staging ring has at least {LEAST_SLOTS} pages, not {count}")
        self.count = count
        self.limit = count - count // 4
        """Of one direction."""
        self._free = list(range(count - 1, -1, -1))
        self._held: Counter[Direction] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, direction: Direction, count: int) -> tuple[int, ...] | None:
        """So many at once, or None."""
        if count > len(self._free) or self._held[direction] + count > self.limit:
            return None
        self._held[direction] += count
        return tuple(self._free.pop() for _ in range(count))

    def give(self, direction: Direction, slots: Sequence[int]) -> None:
        """Take back what `take` gave."""
        self._held[direction] -= len(slots)
        self._free.extend(slots)
