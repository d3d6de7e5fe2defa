"""A stream's patience with its client."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from aiohttp import web

from router.http import HttpLimits
from router.sse import HIGH_WATER, SlowClientError, SseStream

MUCH = b"data: " + b"x" * HIGH_WATER + b"\n\n"


def with_stream(
    use: Callable[[SseStream, asyncio.StreamReader], Awaitable[None]],
    version: str = "1.1",
    **limits: Any,
) -> None:
    """Run `use` as the handler of a request whose client reads what `use` reads for it; on both
    kinds of event loop."""
    settings = {"body_timeout_s": 1.0, "max_unsent_bytes": 1 << 20, "send_timeout_s": 60.0}

    async def run() -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        readers: list[asyncio.StreamReader] = []

        async def handler(request: web.Request) -> web.StreamResponse:
            stream = SseStream(request, HttpLimits(**{**settings, **limits}), {})
            try:
                await use(stream, readers[0])
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
            return await stream.end()

        app = web.Application()
        app.router.add_get("/", handler)
        server = web.AppRunner(app)
        await server.setup()
        await web.TCPSite(server, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*server.addresses[0][:2], limit=4096)
        readers.append(reader)
        writer.write(f"GET / HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        try:
            async with asyncio.timeout(20):
                await done
        finally:
            writer.transport.abort()
            await server.cleanup()

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run())


async def pile_up(stream: SseStream, num_bytes: int) -> None:
    """Begin, then write so much more than the kernel takes."""
    stream.write(b"data: 1\n\n")
    await stream.attend()
    assert stream.begun
    transport = stream._request.transport
    assert transport is not None
    while transport.get_write_buffer_size() < num_bytes:
        stream.write(MUCH)


def test_a_client_that_reads_gets_everything_in_order() -> None:
    async def use(stream: SseStream, reader: asyncio.StreamReader) -> None:
        stream.write(b"data: 1\n\n")
        stream.write(b"data: 2\n\n")
        await stream.attend()
        stream.write(b"data: 3\n\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Transfer-Encoding: chunked" in head
        chunks = [await reader.readuntil(b"\n\n\r\n") for _ in range(2)]
        assert chunks == [b"12\r\ndata: 1\n\ndata: 2\n\n\r\n", b"9\r\ndata: 3\n\n\r\n"]

    with_stream(use)


def test_to_an_old_client_nothing_is_sent_in_chunks() -> None:
    async def use(stream: SseStream, reader: asyncio.StreamReader) -> None:
        stream.write(b"data: 1\n\n")
        await stream.attend()
        stream.write(b"data: 2\n\n")
        assert b"chunked" not in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(18) == b"data: 1\n\ndata: 2\n\n"

    with_stream(use, version="1.0")


def test_a_slow_client_is_waited_for() -> None:
    async def use(stream: SseStream, reader: asyncio.StreamReader) -> None:
        await pile_up(stream, 2 * HIGH_WATER)
        waiting = asyncio.create_task(stream.attend())
        await asyncio.sleep(0)
        assert not waiting.done()
        while not waiting.done():
            await reader.read(1 << 16)
        await waiting

    with_stream(use, max_unsent_bytes=100 * HIGH_WATER)


def test_what_stays_unread_cuts_the_stream_off() -> None:
    async def use(stream: SseStream, reader: asyncio.StreamReader) -> None:
        await pile_up(stream, 2 * HIGH_WATER)
        with pytest.raises(SlowClientError):
            await stream.attend()

    with_stream(use, max_unsent_bytes=100 * HIGH_WATER, send_timeout_s=0.05)


def test_too_much_cuts_a_stream_off_before_it_is_waited_for() -> None:
    async def use(stream: SseStream, reader: asyncio.StreamReader) -> None:
        await pile_up(stream, 4 * HIGH_WATER)
        with pytest.raises(SlowClientError):
            await stream.attend()

    with_stream(use, max_unsent_bytes=3 * HIGH_WATER)


def test_output_that_goes_on_piling_up_cuts_a_waiting_stream_off_once() -> None:
    """More comes between the decision and the moment in which the task hears of it."""

    async def use(stream: SseStream, reader: asyncio.StreamReader) -> None:
        await pile_up(stream, HIGH_WATER + 1)
        stuck = asyncio.create_task(stream.attend())
        await asyncio.sleep(0)
        for _ in range(6):
            stream.write(MUCH)
        with pytest.raises(SlowClientError):
            await stuck

    with_stream(use, max_unsent_bytes=3 * HIGH_WATER)
