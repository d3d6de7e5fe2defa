"""How the calls in a request's answer are to be found."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.tools.calls import MakeId
from router.tools.parser import CallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The same for all choices."""

    parser: type[CallParser]
    names: frozenset[str]
    """The functions that may be called."""
    make_id: MakeId
    markers: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that mark calls, with their text: hidden from the client, not from the
    parser."""
    max_calls: int | None = None
    """With so many the answer ends."""
    by_name: bool = False
    """The client named the function. Such an answer ends like any other, as OpenAI has it."""

    def new_parser(self) -> CallParser:
        """For one choice."""
        return self.parser(self.names, self.make_id, max_calls=self.max_calls)
