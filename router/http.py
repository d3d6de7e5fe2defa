"""What all HTTP handlers share: bodies in and out, errors in one shape, request ids, counting."""

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from router.errors import ApiError, internal, invalid
from router.metrics import RouterMetrics

log = logging.getLogger("router.http")

INLINE_ENTRIES = 4096
"""Of a body; these take some milliseconds."""
CLIENT_LEFT = 499
"""Counted for a client that left before its answer was whole; nginx's number."""
MAX_SESSION_CHARS = 256
"""Of a session's name that count."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_random = Random()
_encode = msgspec.json.Encoder().encode


def json_response(
    body: Any, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=_encode(body), status=status, content_type="application/json", headers=headers
    )


async def make_body(build: Callable[[], Any], num_entries: int) -> Any:
    """What `build` returns, ready for `json_response`. With many entries it is built and encoded in
    a thread, so that other requests go on meanwhile."""
    if num_entries <= INLINE_ENTRIES:
        return build()
    return msgspec.Raw(await asyncio.to_thread(lambda: _encode(build())))


def error_response(error: ApiError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error.body(), error.status, headers)


def request_id(request: web.Request, given: str | None = None) -> str:
    """The client's name for its request, from the header or the body, or a new one.

    Raises:
        ApiError: 400 where it cannot be a header.
    """
    name = request.headers.get("X-Request-Id") or given
    if not name:
        return f"{_random.getrandbits(128):032x}"
    if not _REQUEST_ID.fullmatch(name):
        message = "a request id is 1 to 256 printable ASCII characters without spaces"
        raise invalid(message, "rid" if name == given else "x-request-id")
    return name


def session_of(request: web.Request, header: str) -> str:
    """The client's name for the conversation that a request belongs to; empty if it has none."""
    return request.headers.get(header, "")[:MAX_SESSION_CHARS] if header else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Manners with clients; see `RouterConfig`."""

    body_timeout_s: float
    max_unsent_bytes: int
    send_timeout_s: float
    session_header: str = ""


async def read_body(request: web.Request, timeout_s: float | None = None) -> bytes:
    """The whole body; aiohttp refuses what is over the limit.

    Raises:
        ApiError: 408 when it does not come in time.
    """
    if request.content.is_eof():  # nearly always: it came with the head
        return await request.read()
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        message = f"the body did not come within {timeout_s:g} s"
        raise ApiError(408, message, code="body_timeout") from None


def shield_errors(metrics: RouterMetrics) -> Middleware:
    """Middleware: what a handler raises becomes an OpenAI error body; every answer is counted."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except ApiError as error:
            response = error_response(error)
        except web.HTTPException as error:
            response = error_response(_from_http(request, error))
        except Exception as error:
            if isinstance(error, ConnectionError) and _is_gone(request):
                response = web.Response(status=CLIENT_LEFT)  # for the count: nobody gets it
            else:
                log.exception("%s %s failed", request.method, request.path)
                response = error_response(internal("internal error", "internal_error"))
        metrics.on_response(_route(request), response.status)
        return response

    return middleware


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    match error.status:
        case 404:
            message = f"there is no {request.path[:200]}"
        case 405:
            message = f"{request.path[:200]} does not take {request.method}"
        case 413:
            message = "the body is larger than this router allows"
        case _:
            message = error.text or error.reason
    return ApiError(error.status, message, code=_CODES.get(error.status))


_CODES = {404: "unknown_url", 405: "method_not_allowed", 413: "body_too_large"}


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical
