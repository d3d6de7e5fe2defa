"""What the prefix cache costs: by the pages of the request, whatever the size of the pool.

Counted in executed lines, not in seconds: that is the same on every machine, however busy.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from common.kv_cache.manager import KVCacheManager
from tests.unit.kv_cache.test_prefix_machine import request

PAGE = 16


def lines_of(work: Callable[[], Any]) -> int:
    """Lines of the cache's own files that `work` executes."""
    count = 0

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if "kv_cache" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def full(num_pages: int) -> KVCacheManager:
    """A pool whose every page is cached and idle: chains of 50 pages."""
    kv = KVCacheManager(num_pages, PAGE, lambda adapter: b"root")
    for number in range(num_pages // 50):
        req = request(number, [number, *range(50 * PAGE - 1)])
        assert kv.admit(req, req.num_tokens) == 0
        kv.publish(req, req.num_tokens)
        kv.release(req)
    assert kv.num_cached == num_pages
    return kv


def life(kv: KVCacheManager, pages: int) -> int:
    """Lines for a request that hits half of its pages and evicts for the other half."""
    hit = pages // 2 * PAGE
    warm = request(10**6, [7, *range(hit - 1)])
    kv.admit(warm, hit)
    kv.publish(warm, hit)
    kv.release(warm)
    req = request(10**6 + 1, [*warm.prompt_ids, *range(5000, 5000 + hit)])

    def live() -> None:
        assert kv.pages_to_admit(req, req.num_tokens) == pages
        assert kv.admit(req, req.num_tokens) == hit
        kv.publish(req, req.num_tokens)
        kv.release(req)

    return lines_of(live)


def test_a_larger_pool_costs_nothing() -> None:
    small, large = life(full(1000), 40), life(full(16_000), 40)
    assert small == large


@pytest.mark.parametrize("pages", [20, 80])
def test_twice_the_pages_cost_twice_as_much(pages: int) -> None:
    once, twice = life(full(1000), pages), life(full(1000), 2 * pages)
    assert once < twice <= 2 * once


def test_a_request_that_waits_for_room_hashes_its_prompt_once() -> None:
    kv = full(1000)
    holder = request(1, list(range(9000, 9000 + 990 * PAGE)))
    assert kv.admit(holder, holder.num_tokens) == 0
    waiting = request(2, [0, *range(40 * PAGE)])
    assert kv.admit(waiting, waiting.num_tokens) is None
    hashes = waiting.hashes
    assert hashes is not None
    known = hashes.num_known
    assert known == 40
    again = lines_of(lambda: kv.admit(waiting, waiting.num_tokens))
    assert again < 200, "and looking again costs a look at each page at most"
