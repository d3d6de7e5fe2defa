"""A stream's patience with its client."""

import asyncio

import pytest
from aiohttp.test_utils import make_mocked_request

from router.http import HttpLimits
from router.sse import SlowClientError, SseStream


def test_output_that_goes_on_piling_up_cuts_a_stream_off_once() -> None:
    """More comes between the decision and the moment in which the writer hears of it."""

    async def run() -> None:
        limits = HttpLimits(body_timeout_s=1.0, max_unsent_bytes=100, send_timeout_s=60.0)
        stream = SseStream(make_mocked_request("POST", "/"), limits, {})
        stream.on_unsent(10**6)  # nothing waits for the client: whoever takes it is about to
        stuck = asyncio.create_task(stream._within_time(asyncio.Event().wait()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        stream.on_unsent(100)
        await asyncio.sleep(0)
        assert not stuck.done()
        for _ in range(3):
            stream.on_unsent(101)
            stream.on_unsent(102)
            await asyncio.sleep(0)
        with pytest.raises(SlowClientError):
            await stuck

    asyncio.run(run())
