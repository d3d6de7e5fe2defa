"""Aborts of one and of all at random moments: each request ends once, and pages come home."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.load import End, Load, Stream, Work, make_work
from tests.faults.matrix import PATIENT
from tests.integration.client import Client, client, eventually
from tests.integration.oracle import Oracle
from tests.processes import Fleet, fleet, showing_logs
from tests.tiny_models import make_tiny_model

REQUESTS = 64
PROMPT_END_S = 5.0
"""An abort that takes longer has waited for something it must not wait for."""

pytestmark = pytest.mark.timeout(300)
"""Starting a fleet takes a busy machine a minute, and counts for the first test."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def works(folder: Path) -> list[Work]:
    return make_work(Oracle(folder), random.Random(64), 24, (1, 150), (40, 120))


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Fleet]:
    """2P2D whose pools hold about four requests each, and two routers that overfill them."""
    flags = {"num_pages": 40, "chunk_size": 64}
    with fleet(
        folder, prefill=2, decode=2, routers=2, node_flags=flags, router_flags=PATIENT
    ) as made:
        yield made


async def abort(stream: Stream) -> None:
    """By its exact id, through its own router."""
    async with client(stream.url) as session:
        status, answer = await session.post("/abort_request", {"rid": stream.rid})
        assert status == 200, answer


async def abort_all(running: Fleet) -> None:
    """Through both routers: each knows what waits at it."""
    for url in running.urls:
        async with client(url) as session:
            status, answer = await session.post("/abort_request", {"abort_all": True})
            assert status == 200, answer


async def pause(session: Client) -> None:
    status, answer = await session.post("/pause_generation", {"mode": "in_place"})
    assert status == 200, answer


async def go_on(session: Client) -> None:
    status, answer = await session.post("/continue_generation")
    assert status == 200, answer


def judge(streams: list[Stream], aborted: set[str]) -> None:
    """Whoever was aborted has a right beginning or had finished before; all others are whole."""
    for stream in streams:
        assert stream.ends == 1, stream.describe()
        assert stream.is_prefix, stream.describe()
        may_be_cut = stream.rid in aborted and stream.end is End.ABORTED
        assert stream.is_right or may_be_cut, stream.describe()


def take_turns(works: list[Work], count: int) -> list[Work]:
    return [works[i % len(works)] for i in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_exact_ids_at_random_moments(seed: int, running: Fleet, works: list[Work]) -> None:
    async def run() -> None:
        chance = random.Random(seed)
        async with (
            showing_logs(running),
            client(running.url) as session,
            Load(running.urls, take_turns(works, REQUESTS)) as load,
        ):
            aborted: set[str] = set()
            while load.unfinished:
                await asyncio.sleep(chance.uniform(0, 0.05))
                victim = chance.choice(load.streams)
                if victim.end is None and len(aborted) < REQUESTS // 2:
                    aborted.add(victim.rid)
                    await abort(victim)
            await load.finish()
            judge(load.streams, aborted)
            assert any(stream.end is End.ABORTED for stream in load.streams)
            assert any(stream.is_right for stream in load.streams)
            await session.wait_idle(PROMPT_END_S)

    asyncio.run(run())


@pytest.mark.parametrize("heard", [0, 1, 100, 700])
def test_all_of_64(heard: int, running: Fleet, works: list[Work]) -> None:
    """At the very start, with the first token, and with some requests done."""

    async def run() -> None:
        async with (
            showing_logs(running),
            client(running.url) as session,
            Load(running.urls, take_turns(works, REQUESTS)) as load,
        ):
            while load.heard < heard:
                await asyncio.sleep(0.005)
            while load.unfinished:  # those that were not accepted yet hear of the next one
                await abort_all(running)
            await load.finish()
            judge(load.streams, {stream.rid for stream in load.streams})
            await session.wait_idle(PROMPT_END_S)
            assert await session.tokens(works[0].prompt, 40) == works[0].answer[:40]

    asyncio.run(run())


@pytest.mark.parametrize("everybody", [False, True], ids=["by id", "all"])
def test_while_paused_in_place_and_waiting_for_pages(
    everybody: bool, running: Fleet, works: list[Work]
) -> None:
    """sglang#25561, #30912: nothing computes and most wait for pages; an abort still ends them."""

    async def run() -> None:
        async with (
            showing_logs(running),
            client(running.url) as session,
            Load(running.urls, take_turns(works, REQUESTS)) as load,
        ):
            await pause_while_some_wait(session)
            victims = [stream for stream in load.streams if stream.end is None]
            if everybody:
                await abort_all(running)
            else:
                victims = victims[::3]
                await asyncio.gather(*(abort(stream) for stream in victims))
            async with asyncio.timeout(PROMPT_END_S):
                while any(stream.end is None for stream in victims):
                    await asyncio.sleep(0.01)
            if everybody:
                await session.wait_idle(PROMPT_END_S)  # while it is still paused
            await go_on(session)
            await load.finish()
            judge(load.streams, {stream.rid for stream in victims})
            await session.wait_idle(PROMPT_END_S)

    asyncio.run(run())


async def pause_while_some_wait(session: Client) -> None:
    """Stop everything at a moment at which a decode node has no pages for some request."""
    for _ in range(20):

        async def some_wait() -> bool:
            return await waiting_for_pages(session) > 0

        await eventually(some_wait, 30)
        await pause(session)
        if await some_wait():
            return
        await go_on(session)
    raise AssertionError("nobody ever waited for pages")


async def waiting_for_pages(session: Client) -> int:
    """Requests that a decode node holds without a page."""
    infos = [await session.node_info(node) for node in await session.nodes()]
    return sum(info["stats"].get("queues", {}).get("prealloc", 0) for info in infos)
