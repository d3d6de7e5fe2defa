"""A write on its way through host memory, in pieces of a few pages. Pure.

    fetching (from the device into own slots)  ┐
    asking (for slots of the peer's ring)      ┴▶ posted ─▶ confirming (the peer copies) ─▶ ended

A piece skips what its two sides do not need. The last piece of a write carries the notification and
is posted only when all others are in their pages.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from common.plan import Write, WriteDone, WriteFailed
from transfer.courier import Ready, at_once

Part = tuple[tuple[int, ...], tuple[int, ...]]
"""Source pages, and the target pages they go into."""


class Phase(Enum):
    PREPARING = auto()
    """Fetching, asking, or ready and waiting for its turn."""
    POSTED = auto()
    CONFIRMING = auto()
    """Landed in the peer's slots, and not known to be in its pages."""


@dataclass(slots=True, eq=False)
class Piece:
    tag: int
    delivery: "Delivery"
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    is_last: bool
    phase: Phase = Phase.PREPARING
    slots: tuple[int, ...] = ()
    """Own slots; empty where the pool itself is read."""
    fetched: Ready = at_once
    boxes: tuple[int, ...] = ()
    """Where the peer answers; empty where its pool itself is written to."""
    granted: tuple[int, ...] = ()
    """The peer's slots."""
    asked_at: float = 0.0
    known: bool = False
    """The peer has taken the question in."""

    @property
    def wanted_boxes(self) -> tuple[int, ...]:
        """Those whose words would move it on."""
        if self.phase is Phase.CONFIRMING:
            return self.boxes[:1]
        return self.boxes if self.phase is Phase.PREPARING and not self.granted else ()

    @property
    def may_go(self) -> bool:
        """Whether the peer is ready for it, and the others of the write are where they belong."""
        first = bool(self.granted) or not self.boxes
        return first and (not self.is_last or len(self.delivery.open) == 1)


@dataclass(slots=True, eq=False)
class Delivery:
    """A write that has begun. It ends once nothing of it is open and nothing is left to begin."""

    write: Write
    started_at: float
    unbegun: deque[Part]
    open: list[Piece] = field(default_factory=list)
    num_bytes: int = 0
    error: str | None = None
    settled_at: float = 0.0
    """Not to be ended before: what had reached the peer may still be copied there."""

    @property
    def is_over(self) -> bool:
        return not self.open and not self.unbegun

    @property
    def num_slots(self) -> int:
        """Own slots that it has."""
        return sum(len(piece.slots) for piece in self.open)

    @property
    def is_posted(self) -> bool:
        """Whether nothing of it is still to be posted."""
        return not self.unbegun and all(p.phase is not Phase.PREPARING for p in self.open)

    def fail(self, error: str) -> None:
        """No further piece begins."""
        self.error = self.error or error
        self.unbegun.clear()

    def end(self, now: float) -> WriteDone | WriteFailed:
        write = self.write
        if self.error is not None:
            return WriteFailed(write.room, write.chunk, self.error)
        return WriteDone(write.room, write.chunk, self.num_bytes, now - self.started_at)


def cut(write: Write, pages_a_piece: int) -> deque[Part]:
    """The parts of a write, in order."""

    def part(pages: Sequence[int], start: int) -> tuple[int, ...]:
        return tuple(pages[start : start + pages_a_piece])

    starts = range(0, len(write.source_pages), pages_a_piece)
    return deque((part(write.source_pages, s), part(write.target_pages, s)) for s in starts)
