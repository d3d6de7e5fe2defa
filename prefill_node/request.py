"""What a prefill node knows of a request beside what every node does."""

from dataclasses import dataclass, field

from common.messages import Destination, FailureKind, Incarnation, StopReason
from common.request import Req


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillReq(Req):
    twin_deadline: float
    peer: Incarnation = ""
    """The decode incarnation it goes to; empty until the destination is known."""
    destination: Destination | None = None
    pages_written: int = 0
    """Logical pages posted so far, or already on decode."""
    num_chunks: int = 0
    """Writes posted so far; the next one's number."""
    posted: set[int] = field(default_factory=set)
    landed: list[int] = field(default_factory=list)
    finished: StopReason | None = None
    """The first token ended the request."""
    cancelled: bool = False
    """Decode asked for its pages back and waits for `Drained`."""
    failure: tuple[FailureKind, str] | None = None
    """Set when stopped: what decode will hear once drained."""

    @property
    def remaining(self) -> int:
        return self.num_uncomputed
