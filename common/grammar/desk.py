"""Whose grammar a node has yet to compile. Pure.

Compiling takes milliseconds as a rule and half a second at the worst, so it is done beside the
engine, while a request waits for its peer and for pages; one that comes to its turn before its
grammar does is passed over.
"""

from collections.abc import Callable

from common.lifecycle import R
from common.messages import FailureKind, Room
from common.plan import CompileGrammar, GrammarEvent, GrammarFailed
from common.request import Req


class GrammarDesk:
    """Asks for each request's grammar once, and knows which are still to come."""

    def __init__(self) -> None:
        self._pending: set[Room] = set()
        self._commands: list[CompileGrammar] = []

    def want(self, req: Req) -> None:
        """A request was accepted."""
        grammar = req.sampling.grammar
        if grammar is not None:
            self._pending.add(req.room)
            self._commands.append(CompileGrammar(req.room, grammar))

    def ready(self, req: Req) -> bool:
        """Whether it may be computed, as far as its grammar is concerned."""
        return req.room not in self._pending

    def on_event(
        self,
        event: GrammarEvent,
        req: R | None,
        fail: Callable[[R, FailureKind, str], None],
    ) -> None:
        """`req`, whose grammar it is about, may have ended meanwhile."""
        self._pending.discard(event.room)
        if req is not None and isinstance(event, GrammarFailed):
            fail(req, FailureKind.INVALID, event.error)

    def take_commands(self) -> tuple[CompileGrammar, ...]:
        """All since the last call."""
        commands, self._commands = tuple(self._commands), []
        return commands
