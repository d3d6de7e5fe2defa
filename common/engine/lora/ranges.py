"""Which rank rows of the pool belong to which slot. Pure."""

from dataclasses import dataclass

GRANULE = 8
"""Ranges begin and end at multiples of this, so that several make one regular view."""


@dataclass(frozen=True, slots=True)
class RankRange:
    """Rank rows [first, first + rank); the rows up to `last` are padding."""

    first: int
    rank: int

    @property
    def last(self) -> int:
        return self.first + round_up(self.rank)


class RankRanges:
    """Gives each slot a contiguous range, as low as possible.

    The rows are `slots` chunks of the largest rank each, and no range crosses from one chunk into
    the next. So there is always room: the other `slots - 1` slots hold one range each, which lies
    in one chunk, so at least one chunk holds none of them, and a chunk fits every rank.
    """

    def __init__(self, slots: int, max_rank: int) -> None:
        self._chunk = round_up(max_rank)
        self._slots = slots
        self._taken: dict[int, RankRange] = {}

    @property
    def capacity(self) -> int:
        return self._slots * self._chunk

    def take(self, slot: int, rank: int) -> RankRange:
        """Give `slot` a range, instead of the one it had."""
        assert 0 <= slot < self._slots, f"there is no slot {slot}"
        assert 0 < rank <= self._chunk, f"rank {rank} fits no chunk of {self._chunk}"
        self.free(slot)
        first = min(self._fitting(round_up(rank)))
        self._taken[slot] = RankRange(first, rank)
        return self._taken[slot]

    def free(self, slot: int) -> None:
        self._taken.pop(slot, None)

    def _fitting(self, size: int) -> list[int]:
        """Where a range of `size` rows could begin: a chunk's start, or behind another range."""
        starts = [chunk * self._chunk for chunk in range(self._slots)]
        starts += [taken.last for taken in self._taken.values() if taken.last % self._chunk]
        return [
            start
            for start in starts
            if start % self._chunk + size <= self._chunk
            and all(
                start + size <= taken.first or taken.last <= start for taken in self._taken.values()
            )
        ]


def round_up(rank: int) -> int:
    return -(-rank // GRANULE) * GRANULE
