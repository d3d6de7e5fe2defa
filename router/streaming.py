"""A streamed answer from its first token to its end: text becomes chunks, chunks go out."""

from collections.abc import Sequence
from typing import Protocol

from aiohttp import web

from router.errors import ApiError
from router.generation import Generation
from router.sse import SseStream
from router.text_stream import Delta


class Chunks(Protocol):
    """How an API writes a stream."""

    def lines(self, batch: Sequence[Delta]) -> bytes:
        """The `data:` lines of what is new; empty when there is nothing to show yet."""

    def last(self) -> bytes:
        """Those that follow when every choice has finished."""


class _Pipe:
    """Writes a request's text to its client, where it comes."""

    eager = True

    def __init__(self, sse: SseStream, chunks: Chunks) -> None:
        self._sse = sse
        self._chunks = chunks

    def take(self, batch: Sequence[Delta]) -> None:
        lines = self._chunks.lines(batch)
        if lines:
            self._sse.write(lines)

    def end(self) -> None:
        self._sse.attention.set()


async def stream(sse: SseStream, generation: Generation, chunks: Chunks) -> web.StreamResponse:
    """Send chunks as they come, until all choices have finished or one has failed.

    Raises:
        ApiError: a choice failed before anything was sent.
    """
    try:
        generation.pipe(_Pipe(sse, chunks))
        while not generation.is_over():
            await sse.attend()
        generation.check()
        return await sse.end(chunks.last())
    except ApiError as error:
        if not sse.begun:
            raise
        generation.cancel(error.body()["error"]["code"])
        return await sse.fail(error)
