"""What went wrong with prefix caches elsewhere (docs/failures.md), tried here."""

import gc
from collections.abc import Iterator

import pytest

from common.kv_cache.prefix_cache import CachedPage
from common.messages import Destination, FailureKind, PeerWelcome, RoomFailed, Tokens
from common.plan import Write, WriteDone, WriteFailed
from tests.unit.scheduler.harness import (
    Driven,
    adapter,
    decode,
    destination,
    generate,
    landed,
    prefill,
)
from tests.unit.scheduler.node_settings import FINGERPRINT

PROMPT = list(range(13))
"""Three pages of 4 tokens, and one token."""


def ask(node: Driven, room: int, prompt: list[int]) -> None:
    node.router(generate(room, prompt_ids=prompt))
    node.peer(destination(room, pages=node.scheduler.kv.pages_for(len(prompt))), "d")


def compute(node: Driven, room: int) -> list[Write]:
    """Let a prefill node compute; the room's writes, which are under way then."""
    for _ in range(6):
        node.step()
    return [write for write in node.sent(Write) if write.room == room]


def land(node: Driven, writes: list[Write]) -> None:
    for write in writes:
        node.fact(WriteDone(write.room, write.chunk, 1, 0.1))
    node.step()


def cached_tokens(node: Driven, room: int) -> int:
    """As the room's output says."""
    counts: list[int] = [
        output.cached_tokens
        for tokens in node.said(Tokens)
        for output in tokens.outputs
        if output.room == room
    ]
    return counts[0]


def test_a_cached_page_that_a_write_reads_is_not_given_away() -> None:
    """TensorRT-LLM#12542: evicted before its send. Here the next request waits for its end."""
    node = prefill(num_pages=6)
    ask(node, 1, PROMPT)
    land(node, compute(node, 1))
    ask(node, 2, PROMPT)
    reading = compute(node, 2)
    assert cached_tokens(node, 2) == 12
    assert node.scheduler.kv.num_free == 2
    ask(node, 3, list(range(50, 63)))
    assert compute(node, 3) == []
    land(node, reading)
    writes = compute(node, 3)
    taken = {page for write in writes for page in write.source_pages}
    assert taken & {page for write in reading for page in write.source_pages}


@pytest.mark.parametrize("chunks_before", [1, 2, 3])
def test_after_a_failed_write_only_what_was_computed_counts_as_computed(
    chunks_before: int,
) -> None:
    """vllm#49250: the next attempt starts from a stale count."""
    node = prefill()  # chunks of 6
    ask(node, 1, PROMPT)
    for _ in range(chunks_before):
        node.step()
    node.step()  # the write of the chunk before leaves
    (write, *_) = node.sent(Write)
    node.fact(WriteFailed(1, write.chunk, "broken"))
    node.step()
    for other in node.sent(Write)[1:]:
        node.fact(WriteDone(1, other.chunk, 1, 0.1))
    node.step()
    assert not node.scheduler.unfinished()
    known = node.scheduler.kv.num_cached
    assert known == min(13, 6 * (chunks_before + 1)) // 4
    ask(node, 2, PROMPT)
    land(node, compute(node, 2))
    assert cached_tokens(node, 2) == 4 * known


def test_a_room_that_failed_half_way_leaves_nothing_in_decodes_cache() -> None:
    node = decode()
    node.router(generate(1, prompt_ids=PROMPT))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.step()
    node.fact(landed(1, chunk=0, total=2))
    node.peer(RoomFailed(room=1, kind=FailureKind.TRANSFER, message="broken"), "p")
    node.step()
    assert node.scheduler.kv.num_cached == 0
    node.router(generate(2, prompt_ids=PROMPT))
    node.step()
    (again,) = (d for d in node.said(Destination) if d.room == 2)
    assert (again.first_page, len(again.pages)) == (0, 4)


def cached_pages_alive() -> Iterator[CachedPage]:
    gc.collect()
    return (one for one in gc.get_objects() if type(one) is CachedPage)


def test_adapters_that_come_and_go_leave_no_more_than_the_pool_holds() -> None:
    """dynamo#10729: prefix state for every adapter that there ever was."""
    node = prefill(num_pages=24)
    elsewhere = sum(1 for _ in cached_pages_alive())
    for room in range(1, 301):
        name = f"adapter-{room}"
        node.serve(name)
        node.router(generate(room, prompt_ids=PROMPT, adapter=adapter(name)))
        node.peer(destination(room, pages=4, name=name), "d")
        for _ in range(4):
            node.step()
            node.loader()
        land(node, compute(node, room))
        assert cached_tokens(node, room) == 0
        node.unload(name)
        node.step()
        node.loader()
        node.transfers.clear()
    assert not node.scheduler.unfinished()
    assert node.scheduler.kv.num_cached <= 24
    assert 0 < sum(1 for _ in cached_pages_alive()) - elsewhere <= 24
