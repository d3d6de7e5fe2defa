"""Calls as they are found in a model's text: what is reported of them, and in which pieces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

MakeId = Callable[[], str]


@dataclass(slots=True)
class CallDelta:
    """What is new of one call. The first one names it."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What some text came to."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


def join_calls(calls: list[CallDelta], new: Sequence[CallDelta]) -> None:
    """Add what is new to the calls so far."""
    for delta in new:
        if delta.index == len(calls):
            calls.append(replace(delta))
        else:
            calls[delta.index].arguments += delta.arguments


class CallLog:
    """Numbers calls and joins what is new of each."""

    def __init__(self, make_id: MakeId) -> None:
        self._make_id = make_id
        self._new: list[CallDelta] = []
        self.begun = 0
        self.ended = 0
        """Calls whose arguments are whole."""

    def begin(self, name: str) -> None:
        self._new.append(CallDelta(self.begun, self._make_id(), name))
        self.begun += 1

    def argue(self, text: str) -> None:
        """The next piece of the last call's arguments."""
        index = self.begun - 1
        if not self._new or self._new[-1].index != index:
            self._new.append(CallDelta(index))
        self._new[-1].arguments += text

    def end(self) -> None:
        self.ended += 1

    def take(self) -> list[CallDelta]:
        """What is new since the last time."""
        new, self._new = self._new, []
        return new
