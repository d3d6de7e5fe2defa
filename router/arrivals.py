"""HTTP requests that are not accepted yet: their bodies are being read, checked and tokenised.

They count as requests, so that what waits for tokenisation is bounded; an abort reaches them too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Arrival:
    """One HTTP request."""

    at: float
    """When its head had come; its time-out counts from here."""
    exempt: bool = False
    """A probe: taken in also when clients are refused."""
    rid: str = ""
    """The client's name for it; empty until it is known."""
    aborted: bool = False
    """Somebody asked for its end before it began."""


class Arrivals:
    """All of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: set[Arrival] = set()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def open(self, *, exempt: bool = False) -> Iterator[Arrival]:
        """A request is here until it is accepted or refused, or its client leaves."""
        arrival = Arrival(self._clock(), exempt)
        self._open.add(arrival)
        try:
            yield arrival
        finally:
            self._open.discard(arrival)

    def accepted(self, arrival: Arrival) -> None:
        """It is among the jobs now."""
        self._open.discard(arrival)

    def abort(self, rid: str | None) -> int:
        """Mark those of a name, or all; returns how many."""
        found = [a for a in self._open if rid in (None, a.rid) and not a.aborted and not a.exempt]
        for arrival in found:
            arrival.aborted = True
        return len(found)
