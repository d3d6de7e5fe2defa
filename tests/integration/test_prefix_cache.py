"""With prefix caches on both roles every text is what it is without: the oracle's, token for token.

Pools are so small that pages are evicted and requests retracted all the time; conversations share
beginnings at every offset in a page.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from router.tokens import load_codec
from tests.faults.load import Work
from tests.faults.matrix import PATIENT
from tests.integration.client import Client, client, eventually
from tests.integration.lora_rig import Wardrobe, crowded_fleet, load_all
from tests.integration.oracle import random_prompt
from tests.integration.prefix_rig import (
    PAGE,
    Conversation,
    asker,
    cached_pages,
    cached_tokens,
    converse,
    flush,
    make_conversations,
    role_counter,
)
from tests.processes import Fleet, fleet, showing_logs

NODE_FLAGS = {"page_size": PAGE, "num_pages": 48, "chunk_size": 24}
"""Pools for about four requests."""

pytestmark = pytest.mark.timeout(300)
"""Starting a fleet takes a busy machine a minute, and counts for the first test."""


@pytest.fixture(scope="module")
def running(wardrobe: Wardrobe) -> Iterator[Fleet]:
    with crowded_fleet(wardrobe, NODE_FLAGS, PATIENT) as made:
        yield made


@pytest.fixture(scope="module")
def conversations(wardrobe: Wardrobe) -> list[Conversation]:
    adapters = [None, *list(wardrobe.adapters)[:2]]
    return make_conversations(wardrobe, random.Random(5), adapters)


@asynccontextmanager
async def asking(running: Fleet, wardrobe: Wardrobe) -> AsyncIterator[Client]:
    async with showing_logs(running), client(running.url) as session:
        await load_all(session, wardrobe)
        yield session


def test_texts_are_right_while_pages_are_reused_and_evicted(
    running: Fleet, wardrobe: Wardrobe, conversations: list[Conversation]
) -> None:
    async def run() -> None:
        async with asking(running, wardrobe) as session:
            for number in range(3):
                ask = asker(session, random.Random(number))
                assert await converse(ask, conversations) == []
            await session.wait_idle()
            for role in ("prefill", "decode"):
                assert await role_counter(session, role, "cache_hit_tokens") > 0, role
                assert await role_counter(session, role, "cache_evictions") > 0, role
            assert await role_counter(session, "decode", "retractions") > 0
            assert await cached_pages(session) > 0

    asyncio.run(run())


def test_texts_are_right_without_a_cache(
    wardrobe: Wardrobe, conversations: list[Conversation]
) -> None:
    flags = NODE_FLAGS | {"prefix_cache": False}

    async def run(made: Fleet) -> None:
        async with asking(made, wardrobe) as session:
            assert await converse(asker(session, random.Random(1)), conversations) == []
            assert await session.counter("cache_hit_tokens") == 0
            assert await cached_pages(session) == 0

    with fleet(wardrobe.model, prefill=2, decode=2, node_flags=flags, router_flags=PATIENT) as made:
        asyncio.run(run(made))


def test_texts_are_right_while_nodes_pause_flush_and_die(
    running: Fleet, wardrobe: Wardrobe, conversations: list[Conversation]
) -> None:
    async def disturb(session: Client, over: asyncio.Event) -> None:
        for mode in ("retract", "in_place", "retract"):
            assert (await session.post("/pause_generation", {"mode": mode}))[0] == 200
            if mode == "retract":
                await flush(session)
                assert await cached_pages(session) == 0
            assert (await session.post("/continue_generation"))[0] == 200
            await asyncio.sleep(0.5)
        for name in ("decode-1", "prefill-1"):
            assert not over.is_set(), f"all was answered before {name} died"
            running[name].kill()
            await asyncio.sleep(1)
            running[name].start()
            await running.ready()

    async def run() -> None:
        async with asking(running, wardrobe) as session:
            over = asyncio.Event()
            disturbing = asyncio.create_task(disturb(session, over))
            rounds = 0
            while rounds < 2 or not disturbing.done():
                ask = asker(session, random.Random(rounds))
                assert await converse(ask, conversations) == []
                rounds += 1
            over.set()
            await disturbing
            await session.wait_idle()

    asyncio.run(run())


def test_adapters_do_not_share_what_they_computed(running: Fleet, wardrobe: Wardrobe) -> None:
    prompt = random_prompt(random.Random(8), 6 * PAGE + 3)
    names = [None, *list(wardrobe.adapters)[:2]]
    works = [Work(prompt, wardrobe.answer(prompt, 5, name), name) for name in names]
    assert len({tuple(work.answer) for work in works}) == len(works)

    async def run() -> None:
        async with asking(running, wardrobe) as session:
            await flush(session)
            for work in works:
                assert await cached_tokens(session, work) == 0, work.adapter
            for work in works:
                await eventually(lambda work=work: is_cached(session, work), 20)  # type: ignore[misc]

    asyncio.run(run())


async def is_cached(session: Client, work: Work) -> bool:
    """Asked again, sooner or later by the node that has it, all of it but the last page is."""
    return await cached_tokens(session, work) == (len(work.prompt) - 1) // PAGE * PAGE


def test_choices_of_one_prompt_share_it(running: Fleet, wardrobe: Wardrobe) -> None:
    codec = load_codec(wardrobe.model)
    chance = random.Random(9)
    trunk = random_prompt(chance, 2 * PAGE)
    prompts = [trunk + random_prompt(chance, length) for length in range(1, 2 * PAGE)]
    texts = [codec.decode(wardrobe.answer(p, 12), skip_special_tokens=True) for p in prompts]

    async def run() -> None:
        async with asking(running, wardrobe) as session:
            body = {"prompt": prompts, "n": 3, "max_tokens": 12, "temperature": 0}
            status, answer = await session.post("/v1/completions", body | {"ignore_eos": True})
            assert status == 200, answer
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            got = [choice["text"] for choice in choices]
            assert got == [text for text in texts for _ in range(3)]
            await session.wait_idle()

    asyncio.run(run())
