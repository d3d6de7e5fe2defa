"""Streamed answers of OpenAI's APIs: from what is new to `data:` lines.

Nearly every chunk of a choice differs from the one before in its text alone. So the body around the
text is encoded once, by the same code that makes all other chunks, and texts are put into it.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from router.generation import Generation
from router.protocol.requests import StreamOptions
from router.protocol.responses import Bodies, usage
from router.sse import data_line
from router.text_stream import Delta, TokenRecord

_MARK = "(the text goes here)"

_encode = msgspec.json.Encoder().encode


class OpenAIChunks:
    """Of one request."""

    def __init__(self, bodies: Bodies, generation: Generation, options: StreamOptions) -> None:
        self._bodies = bodies
        self._generation = generation
        self._include_usage = bool(options.include_usage)
        self._running_usage = bool(options.include_usage and options.continuous_usage_stats)
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """Of choices that have begun: what is around the text of a chunk that has nothing else."""
        self._begun: set[int] = set()
        self._held: dict[int, list[TokenRecord]] = {}
        """Logprobs that wait for the text that they become a part of."""

    def lines(self, batch: Sequence[Delta]) -> bytes:
        """A line for each delta that shows something."""
        return self._line(batch[0]) if len(batch) == 1 else b"".join(map(self._line, batch))

    def last(self) -> bytes:
        """The usage, if it was asked for."""
        if not self._include_usage:
            return b""
        body = self._bodies.head.body(self._bodies.chunk_kind, [])
        return data_line({**body, "usage": usage(self._generation)})

    def _line(self, delta: Delta) -> bytes:
        choice = delta.choice
        if delta.prompt_logprobs is not None or delta.calls:
            return self._any_line(delta)
        if delta.finish is None and not delta.logprobs:
            if not delta.text:
                return b""
            around = self._around.get(choice)
            if around is not None and choice not in self._held:
                return around[0] + _encode(delta.text) + around[1]
        elif not delta.text and delta.finish is None:
            self._held.setdefault(choice, []).extend(delta.logprobs)
            return b""
        return self._any_line(delta)

    def _any_line(self, delta: Delta) -> bytes:
        choice = delta.choice
        if choice in self._held:
            delta.logprobs = [*self._held.pop(choice), *delta.logprobs]
        first = choice not in self._begun
        if first:
            self._begin(choice)
        return data_line(self._body(delta, first=first))

    def _body(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        choice = self._bodies.chunk_choice(delta, first=first)
        body = self._bodies.head.body(self._bodies.chunk_kind, [choice])
        if self._running_usage:
            body["usage"] = usage(self._generation)
        return body

    def _begin(self, choice: int) -> None:
        self._begun.add(choice)
        if not self._running_usage:
            line = data_line(self._body(Delta(choice, _MARK), first=False))
            # Names before it are the client's and may be anything; what follows it is ours.
            before, _, after = line.rpartition(_encode(_MARK))
            self._around[choice] = before, after
