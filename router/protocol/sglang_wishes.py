"""What /generate asks to be told of probabilities, for all prompts or for each its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from router.errors import invalid
from router.protocol.requests import GenerateRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LogprobWish:
    """Of one prompt."""

    wanted: bool = False
    num_top: int = 0
    start: int | None = None
    """The first prompt token to tell of; None: only what is generated."""

    @property
    def logprobs(self) -> int | None:
        """What nodes are asked of output tokens."""
        return self.num_top if self.wanted else None

    @property
    def prompt_logprobs(self) -> int | None:
        """What nodes are asked of the prompt."""
        return None if self.start is None else self.num_top


def logprob_wishes(request: GenerateRequest, lengths: Sequence[int]) -> list[LogprobWish]:
    """The wishes of each prompt; `lengths` are the prompts' tokens.

    Raises:
        ApiError: 400, naming the field.
    """
    count = len(lengths)
    wanted = each(request.return_logprob, count, "return_logprob", default=False)
    tops = each(request.top_logprobs_num, count, "top_logprobs_num", default=0)
    starts = each(request.logprob_start_len, count, "logprob_start_len", default=-1)
    wishes = []
    for length, want, top, start in zip(lengths, wanted, tops, starts, strict=True):
        if not want:
            wishes.append(LogprobWish())
            continue
        if not -1 <= start <= length:
            message = f"logprob_start_len must be in [-1, {length}], not {start}"
            raise invalid(message, "logprob_start_len")
        wishes.append(LogprobWish(True, top, start if 0 <= start < length else None))
    return wishes


def each(value: T | list[T] | None, count: int, field: str, default: T) -> list[T]:
    """One value for each of `count` prompts.

    Raises:
        ApiError: 400 where another number of them is given.
    """
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise invalid(f"{field}: {len(value)} given for {count} prompts", field)
    return value
