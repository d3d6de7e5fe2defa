"""How fast work gets done, measured from what gets done. Pure: times are the caller's."""

WINDOW = 64
"""Pieces of work that an estimate remembers at least."""
WINDOW_S = 5.0
"""Busy seconds that it remembers at least."""
MIN_BUSY_S = 0.2
"""Busy seconds before there is an estimate."""


class RateMeter:
    """Amount per second of busy time: an exponentially weighted mean over the last pieces.

    Idle time says nothing about what could be done, so the meter runs only while told so. Time is
    taken in with the piece of work that it led to: a long piece does not look like a standstill.
    """

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def run(self, busy: bool, now: float) -> None:
        """Whether there is enough to do from now on for the pace to be the real one."""
        if not busy:
            self._since = None
        elif self._since is None:
            self._since = now

    def add(self, amount: float, now: float) -> None:
        """A piece of work is done; ignored while the meter does not run."""
        if self._since is None:
            return
        seconds = max(0.0, now - self._since)
        keep = 1.0 - min(1.0 / WINDOW, seconds / WINDOW_S)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + seconds
        self._since = now

    @property
    def per_second(self) -> float | None:
        """None until enough was seen."""
        return self._amount / self._seconds if self._seconds >= MIN_BUSY_S else None
