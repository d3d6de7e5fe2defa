"""What the router's HTTP does with a handler's errors."""

import asyncio
import logging
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from router.http import CLIENT_LEFT, shield_errors
from router.metrics import RouterMetrics


async def broken(_: web.Request) -> web.StreamResponse:
    raise ConnectionResetError("Cannot write to closing transport")


def answer(*, is_closing: bool) -> web.StreamResponse:
    transport = Mock(is_closing=Mock(return_value=is_closing))
    transport.get_extra_info.return_value = None
    request = make_mocked_request("POST", "/generate", transport=transport)
    return asyncio.run(_through(request))


async def _through(request: web.Request) -> web.StreamResponse:
    return await shield_errors(RouterMetrics())(request, broken)


def test_a_client_that_left_is_counted_and_costs_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert answer(is_closing=True).status == CLIENT_LEFT
    assert not caplog.records


def test_a_broken_connection_of_our_own_is_not_taken_for_the_clients() -> None:
    assert answer(is_closing=False).status == 500
