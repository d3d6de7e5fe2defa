"""What a decode node knows of a request beside what every node does."""

from dataclasses import dataclass, field

from common.messages import FirstToken, Incarnation
from common.plan import Row, SlotInit
from common.request import Req


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeReq(Req):
    prefill: Incarnation
    prefill_address: str
    deadline: float = float("inf")
    """When the transfer is given up."""
    landed: set[int] = field(default_factory=set)
    drained: bool = False
    """Prefill has said that it writes no more."""
    first_token: FirstToken | None = None
    unsent_pages: list[int] = field(default_factory=list)
    """Pages that the runner's table does not have yet."""
    started: bool = False
    """The runner knows this slot."""

    def next_row(self) -> Row:
        """Its share of the next step; what the runner has not been told goes with it."""
        assert self.slot is not None
        init = None
        if not self.started:
            init = SlotInit(self.sampling, self.prompt_ids, tuple(self.output_ids))
            self.started = True
        new_pages, self.unsent_pages = tuple(self.unsent_pages), []
        return Row(
            slot=self.slot,
            start=self.num_tokens - 1,
            token_ids=(self.output_ids[-1],),
            new_pages=new_pages,
            sample_index=len(self.output_ids),
            init=init,
        )
