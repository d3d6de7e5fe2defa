"""Counts of what went wrong, and a log that whoever causes it cannot fill."""

import logging
import time
from collections import Counter

log = logging.getLogger(__name__)

REPORT_EVERY_S = 10.0
MAX_LINES = 64
"""Different lines in `REPORT_EVERY_S`, however many kinds and senders there are."""


class Tally:
    """Counts by kind; some of each kind get a log line. Use from one thread."""

    def __init__(self, logger: logging.Logger = log) -> None:
        self.counts: Counter[str] = Counter()
        self._log = logger
        self._logged_at: dict[tuple[str, str], float] = {}

    def add(self, what: str, detail: str = "", key: str = "") -> None:
        """Count, and say so at most once in 10 s for each kind (and `key`: an address, a name)."""
        self.counts[what] += 1
        self.tell(what, detail, key)

    def tell(
        self, what: str, detail: str = "", key: str = "", level: int = logging.WARNING
    ) -> None:
        """Say, as often as `add` would, what has been counted already."""
        if self._may_log((what, key), time.monotonic()):
            self._log.log(level, "%s (%d so far) %s", what, self.counts[what], detail)

    def _may_log(self, line: tuple[str, str], now: float) -> bool:
        """The dict is in order of time, so what is old is in front; it never grows for long."""
        recent = self._logged_at
        while recent:
            oldest = next(iter(recent))
            if now - recent[oldest] < REPORT_EVERY_S:
                break
            del recent[oldest]
        if line in recent or len(recent) >= MAX_LINES:
            return False
        recent[line] = now
        return True
