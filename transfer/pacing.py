"""How long the transfer thread sleeps between two looks. Pure.

NIXL's own progress thread spins on a whole core, so it is off and every look also moves the
transport forward: bytes over TCP arrive while the receiver looks. A look costs some 10-30 us of
the GIL that the forward pass wants, so it is taken often only while something is due.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pacing:
    """Seconds between looks. A command always ends the sleep at once."""

    posted_s: float = 0.0005
    """While own writes are posted and something happened just now."""
    slow_s: float = 0.002
    """While own writes are posted and nothing has happened for `patience_s`: a large write on a
    slow network, or a peer that is stopped."""
    patience_s: float = 0.02
    due_s: float = 0.001
    """While peers' writes are due, or something happened just now."""
    idle_s: float = 0.05
    """Otherwise; 20 looks a second are some 0.2 % of a core."""
    linger_s: float = 0.25
    """How long after the last command or event `due_s` holds."""

    def pause_s(self, *, num_posted: int, expecting: bool, quiet_s: float) -> float:
        """The sleep before the next look; `quiet_s` is the time since the last happening."""
        if num_posted:
            return self.posted_s if quiet_s < self.patience_s else self.slow_s
        if expecting or quiet_s < self.linger_s:
            return self.due_s
        return self.idle_s
