"""The seam to the device: a ring of page-sized slots in host memory, and copies to and from it."""

from collections.abc import Sequence
from typing import Protocol

from transfer.courier import Ready


class PageStage(Protocol):
    """Copies pages between a pool and the slots of a ring; used by one thread at a time.

    A slot has the layout of a page. A copy reads and writes until its `Ready` says so, and no
    longer; what `Ready` raises says that the copy failed and is over.
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def buffer(self) -> memoryview:
        """The ring, writable bytes; slot `i` begins `i` pages from its start."""
        ...

    @property
    def address(self) -> int:
        """Of `buffer`."""
        ...

    def fetch(self, pages: Sequence[int], slots: Sequence[int]) -> Ready:
        """Begin to copy pages into slots."""
        ...

    def put(self, slots: Sequence[int], pages: Sequence[int], first: int, count: int) -> Ready:
        """Begin to copy heads [first, first + count) of slots into pages, and no other bytes."""
        ...

    def finish(self) -> None:
        """Wait for every copy that was begun."""
        ...
