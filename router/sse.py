"""A streamed answer: one JSON object a `data:` line, then `data: [DONE]`; never a comment or event.

The response is begun with the first data, so that what fails before is an ordinary HTTP error. What
fails later is a data line with an `error` and the end.

Once it is begun, `write` goes to the transport itself: a token needs no task to be woken and
nothing of aiohttp. The handler's task `attend`s meanwhile to what has to be waited for: the begin,
and a client that does not read. Such a client holds up nobody but itself: its output piles up in
the transport, and when that is too much or lasts too long the answer is cut off. It then gets its
error if it reads within a grace, and after that the connection ends.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

from router.errors import ApiError
from router.http import HttpLimits

CUT_OFF_GRACE_S = 2.0
"""How long a connection that is cut off may take to deliver what was written."""
HIGH_WATER = 64 * 1024
"""Bytes in a transport from which on its client is slow: asyncio's own mark."""
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class SlowClientError(ApiError):
    """The client did not read its stream; nothing more can be written to it."""

    def __init__(self) -> None:
        super().__init__(408, "the stream was not read; it was cut off", code="slow_client")


class SseStream:
    """Writes one streamed answer."""

    def __init__(self, request: web.Request, limits: HttpLimits, headers: dict[str, str]) -> None:
        self.attention = asyncio.Event()
        """Something has to be waited for: look with `attend`."""
        self._request = request
        self._limits = limits
        self._first: list[bytes] = []
        """Lines that came before the response was begun."""
        self._transport: asyncio.Transport | None = None
        """Set once it is begun."""
        self._writer: AbstractStreamWriter | None = None
        self._chunked = False
        self._is_slow = False
        """More than the high-water mark waits for the client."""
        self._waiting: asyncio.Timeout | None = None
        """The wait for the client, while there is one."""
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

    def write(self, lines: bytes) -> None:
        """Send some whole lines, without waiting. To a client that has left nothing is sent."""
        transport = self._transport
        if transport is None:
            self._first.append(lines)
            self.attention.set()
            return
        if transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(lines), lines) if self._chunked else lines)
        if transport.get_write_buffer_size() > HIGH_WATER:
            self._note_slow()

    async def attend(self) -> None:
        """Wait for something to do, and do it: begin the response, or wait until it is read.

        Raises:
            ConnectionError: the client is gone.
            SlowClientError: it does not read.
        """
        await self.attention.wait()
        self.attention.clear()
        if self._first and not self.begun:
            await self._within_time(self._begin(), sum(map(len, self._first)))
        if self._is_slow:
            await self._within_time(self._drain(), HIGH_WATER)

    async def end(self, lines: bytes = b"") -> web.StreamResponse:
        """Send the last lines and close the answer.

        Raises:
            SlowClientError: it was not read in time.
        """
        lines = b"".join((*self._first, lines, DONE))
        await self._within_time(self._end(lines), len(lines))
        return self._response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """End a begun answer with an error."""
        if isinstance(error, SlowClientError):
            await self._cut_off(error)
            return self._response
        try:
            return await self.end(data_line(error.body()))
        except SlowClientError as slow:
            await self._cut_off(slow)
            return self._response

    def _note_slow(self) -> None:
        """Have the task wait for the client; cut the answer off when too much has piled up."""
        self._is_slow = True
        self.attention.set()
        waiting = self._waiting
        if waiting is None or waiting.expired() or not self._is_too_much():
            return
        waiting.reschedule(asyncio.get_running_loop().time())

    def _is_too_much(self) -> bool:
        transport = self._transport
        limit = max(HIGH_WATER, self._limits.max_unsent_bytes)
        return transport is not None and transport.get_write_buffer_size() > limit

    async def _within_time(self, writing: Coroutine[Any, Any, None], size: int) -> None:
        """`size`: bytes, about, that are written."""
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() + size < HIGH_WATER // 2:
            await writing  # it fits into the transport's buffer and need not wait for the client
            return
        try:
            async with asyncio.timeout(self._limits.send_timeout_s) as self._waiting:
                await writing
        except TimeoutError:
            raise SlowClientError() from None
        finally:
            self._waiting = None

    async def _begin(self) -> None:
        self._writer = await self._response.prepare(self._request)
        self._chunked = self._response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"
        lines = b"".join(self._first)
        self._first.clear()
        self._transport = self._request.transport
        await self._response.write(lines)

    async def _drain(self) -> None:
        if self._is_too_much():
            raise TimeoutError
        self._is_slow = False
        if self._writer is not None:
            await self._writer.drain()

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
            await self._response.write(data_line(error.body()))
        transport.close()  # once all is delivered this task is cancelled, like when a client leaves
        try:
            await asyncio.sleep(CUT_OFF_GRACE_S)
        finally:
            transport.abort()


def data_line(body: dict[str, Any]) -> bytes:
    """One object as a line of a stream."""
    return b"data: " + _encode(body) + b"\n\n"
