"""The engine thread's newest word about itself, read by the I/O thread."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.messages import AdapterInfo, NodeStats
from common.stats import RequestEnd, StageSample

BACKLOG = 10_000
"""Reports kept while the I/O thread is busy; older ones are lost to the histograms only."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What happened in one turn of the loop."""

    samples: Sequence[StageSample] = ()
    transferred: Sequence[tuple[int, float]] = ()
    """(bytes, seconds) of each finished write."""
    ends: Sequence[RequestEnd] = ()


class Snapshot:
    """Written by one thread, read by another; each field is replaced whole, so no lock."""

    def __init__(self) -> None:
        self.stats = NodeStats()
        self.adapters: tuple[AdapterInfo, ...] = ()
        """All this node can serve; the same object until that changes."""
        self._measured: deque[Measured] = deque(maxlen=BACKLOG)
        self._turned_at = time.monotonic()
        self._resting = False

    def post(self, stats: NodeStats, measured: Measured, adapters: tuple[AdapterInfo, ...]) -> None:
        """A turn has ended."""
        self.stats = stats
        self.adapters = adapters
        if measured.samples or measured.transferred or measured.ends:
            self._measured.append(measured)
        self._turned_at = time.monotonic()

    def rest(self) -> None:
        """The engine goes to sleep on purpose: that is not being stuck."""
        self._resting = True

    def rise(self) -> None:
        self._turned_at = time.monotonic()
        self._resting = False

    def step_age_s(self) -> float:
        """Seconds since the engine last finished a turn; 0 while it waits for work."""
        return 0.0 if self._resting else time.monotonic() - self._turned_at

    def take_measured(self) -> list[Measured]:
        """All reports since the last call."""
        taken: list[Measured] = []
        while self._measured:
            taken.append(self._measured.popleft())
        return taken
