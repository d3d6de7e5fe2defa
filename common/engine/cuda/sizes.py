"""Batch sizes for which decode steps are captured: a step is padded to the next larger. Pure."""

from bisect import bisect_left
from collections.abc import Sequence


def default_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, ... below `largest`, and that."""
    sizes = []
    size = 1
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)


def usable_sizes(asked: Sequence[int], largest: int) -> tuple[int, ...]:
    """In order, each once; those beyond `largest` can never be met."""
    return tuple(sorted({min(size, largest) for size in asked}))


def padded_size(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of the ordered `sizes` that holds `count` rows; None: none does."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None
