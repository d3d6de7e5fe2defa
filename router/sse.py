"""A streamed answer: one JSON object a `data:` line, then `data: [DONE]`; never a comment or event.

The response is begun with the first data, so that what fails before is an ordinary HTTP error. What
fails later is a data line with an `error` and the end.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from router.errors import ApiError

_encode = msgspec.json.Encoder().encode


class SseStream:
    """Writes one streamed answer."""

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
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
        """
        if not bodies:
            return
        if not self.begun:
            await self._response.prepare(self._request)
        await self._response.write(_lines(bodies))

    async def end(self, bodies: Sequence[dict[str, Any]] = ()) -> web.StreamResponse:
        """Send the last objects and close the answer."""
        if not self.begun:
            await self._response.prepare(self._request)
        await self._response.write_eof(_lines(bodies) + b"data: [DONE]\n\n")
        return self._response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """End a begun answer with an error."""
        return await self.end([error.body()])


def _lines(bodies: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + _encode(body) + b"\n\n" for body in bodies)
