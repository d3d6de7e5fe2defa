"""What a decode node knows of a request beside what every node does."""

from dataclasses import dataclass, field

from common.messages import FirstToken, Incarnation
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
