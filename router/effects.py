"""What the dispatcher decided, as plain data for whoever owns the sockets."""

from dataclasses import dataclass, field

from common.messages import Incarnation, ToNode
from router.requests import Job, Output


@dataclass(frozen=True, slots=True)
class Send:
    node: Incarnation
    body: ToNode


@dataclass(frozen=True, slots=True)
class Delivery:
    """Something for a job's listener."""

    job: Job
    output: Output
    waited_s: float = 0.0
    """Of new tokens: since the token before, or since acceptance for the first."""
    first: bool = False


@dataclass(slots=True)
class Effects:
    """Carried out in the order of the fields."""

    sends: list[Send] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sends or self.deliveries or self.ended)
