"""What the dispatcher decided, as plain data for whoever owns the sockets."""

from dataclasses import dataclass, field

import msgspec

from common.messages import Incarnation, ToNode
from router.requests import Job, NewTokens, Output


class Send(msgspec.Struct, frozen=True):
    node: Incarnation
    body: ToNode


class Delivery(msgspec.Struct, frozen=True):
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

    def tell(self, job: Job, output: Output) -> None:
        """Something for the job's listener."""
        self.deliveries.append(Delivery(job, output))

    def tell_tokens(self, job: Job, output: NewTokens, now: float) -> None:
        """New tokens, with the time that the client waited for them."""
        first = job.times.first_token is None
        waited_s = job.times.note_tokens(now)
        self.deliveries.append(Delivery(job, output, waited_s, first=first))

    def __bool__(self) -> bool:
        return bool(self.sends or self.deliveries or self.ended)
