"""How many requests may have their KV made while no slot is free for them yet. Pure.

Prefill shows a request's first token at once. If decode then has no slot for it, its reader sees
the stream stall at the second token, for as long as somebody else's whole answer. So pages are
named only for as many requests as will find a slot when their KV lands: the free slots, and by
Little's law what ends meanwhile, `ends per second * seconds from naming pages to landing`. Rounded
down: the slot that then stands idle for a moment costs less than the stall.
"""

GAPS_REMEMBERED = 16
LANDINGS_REMEMBERED = 8


class SlotForecast:
    """Exponentially weighted means over the last ends and landings; times are the caller's."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._last_end: float | None = None
        self._gap_s: float | None = None
        self._landing_s = 0.0

    def note_landing(self, seconds: float) -> None:
        """A request's KV is here, `seconds` after its pages were named."""
        self._landing_s += (seconds - self._landing_s) / LANDINGS_REMEMBERED

    def note_end(self, now: float) -> None:
        """A running request gave its slot back."""
        if self._last_end is not None:
            gap_s = now - self._last_end
            known = gap_s if self._gap_s is None else self._gap_s
            self._gap_s = known + (gap_s - known) / GAPS_REMEMBERED
        self._last_end = now

    def slot_awaits(self, taken: int) -> bool:
        """Whether one more request would find a slot. `taken`: those that have one, and those whose
        KV is here or on its way."""
        ends_meanwhile = int(self._landing_s / self._gap_s) if self._gap_s else 0
        return taken < self._num_slots + ends_meanwhile
