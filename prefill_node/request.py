"""What a prefill node knows of a request beside what every node does."""

from dataclasses import dataclass, field

from common.messages import Destination, FailureKind, Incarnation, StopReason
from common.plan import Row, SlotInit
from common.request import Req


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillReq(Req):
    twin_deadline: float
    peer: Incarnation = ""
    """The decode incarnation it goes to; empty until the destination is known."""
    destination: Destination | None = None
    num_computed: int = 0
    """Positions whose KV is in `pages`."""
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
        return self.num_tokens - self.num_computed

    def next_row(self, share: int, lora_slot: int | None) -> Row:
        """The next `share` positions; the last of them all draws the first token.

        `lora_slot`: where its adapter is.
        """
        first = self.num_computed == 0
        end = self.num_computed + share
        assert self.slot is not None
        return Row(
            slot=self.slot,
            start=self.num_computed,
            token_ids=self.context()[self.num_computed : end],
            new_pages=tuple(self.pages) if first else (),
            sample_index=len(self.output_ids) if end == self.num_tokens else None,
            init=SlotInit(self.sampling, self.prompt_ids, tuple(self.output_ids))
            if first
            else None,
            lora_slot=lora_slot,
        )


@dataclass(frozen=True, slots=True)
class EarlyDestination:
    peer: Incarnation
    destination: Destination
    deadline: float
