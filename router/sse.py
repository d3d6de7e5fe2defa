"""A streamed answer: one JSON object a `data:` line, then `data: [DONE]`; never a comment or event.

The response is begun with the first data, so that what fails before is an ordinary HTTP error. What
fails later is a data line with an `error` and the end.

A client that does not read holds up nobody but itself: a write waits until the socket's buffer has
room, meanwhile the output piles up in memory, and when it is too much or takes too long the answer
is cut off. It then gets its error if it reads within a grace, and after that the connection ends.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web

from router.errors import ApiError
from router.http import HttpLimits

CUT_OFF_GRACE_S = 2.0
"""How long a connection that is cut off may take to deliver what was written."""

_encode = msgspec.json.Encoder().encode


class SlowClientError(ApiError):
    """The client did not read its stream; nothing more can be written to it."""

    def __init__(self) -> None:
        super().__init__(408, "the stream was not read; it was cut off", code="slow_client")


class SseStream:
    """Writes one streamed answer."""

    def __init__(self, request: web.Request, limits: HttpLimits, headers: dict[str, str]) -> None:
        self._request = request
        self._limits = limits
        self._write: asyncio.Timeout | None = None
        """The write that waits for the client, while there is one."""
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )

    @property
    def begun(self) -> bool:
        return self._response.prepared

    async def send(self, bodies: Sequence[dict[str, Any]]) -> None:
        """Send some objects in one write.

        Raises:
            ConnectionError: the client is gone.
            SlowClientError: it does not read.
        """
        if not bodies:
            return
        await self._within_time(self._send(_lines(bodies)))

    def on_unsent(self, num_bytes: int) -> None:
        """So much waits behind a write: cut the answer off when it is too much."""
        write = self._write
        if write is None or write.expired():  # nothing waits, or it is being cut off already
            return
        if num_bytes > self._limits.max_unsent_bytes:
            write.reschedule(asyncio.get_running_loop().time())

    async def end(self, bodies: Sequence[dict[str, Any]] = ()) -> web.StreamResponse:
        """Send the last objects and close the answer.

        Raises:
            SlowClientError: it was not read in time.
        """
        await self._within_time(self._end(_lines(bodies) + b"data: [DONE]\n\n"))
        return self._response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """End a begun answer with an error."""
        if isinstance(error, SlowClientError):
            await self._cut_off(error)
            return self._response
        try:
            return await self.end([error.body()])
        except SlowClientError as slow:
            await self._cut_off(slow)
            return self._response

    async def _within_time(self, writing: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._limits.send_timeout_s) as self._write:
                await writing
        except TimeoutError:
            raise SlowClientError() from None
        finally:
            self._write = None

    async def _send(self, lines: bytes) -> None:
        if not self.begun:
            await self._response.prepare(self._request)
        await self._response.write(lines)

    async def _end(self, lines: bytes) -> None:
        if not self.begun:
            await self._response.prepare(self._request)
        await self._response.write_eof(lines)

    async def _cut_off(self, error: ApiError) -> None:
        """Write the error behind what the client has not read, and close."""
        transport = self._request.transport
        if transport is None:
            return
        with suppress(ConnectionError, RuntimeError):  # gone meanwhile, or at its end already
            await self._response.write(_lines([error.body()]))
        transport.close()  # once all is delivered this task is cancelled, like when a client leaves
        try:
            await asyncio.sleep(CUT_OFF_GRACE_S)
        finally:
            transport.abort()


def _lines(bodies: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + _encode(body) + b"\n\n" for body in bodies)
