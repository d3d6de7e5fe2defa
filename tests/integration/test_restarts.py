"""Processes that come back at their old addresses, and two routers on one cluster."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.load import End, Load, Work, make_work
from tests.faults.matrix import PATIENT
from tests.integration.client import Client, client, eventually
from tests.integration.oracle import Oracle
from tests.processes import Fleet, fleet, showing_logs
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(300)
"""Starting a fleet takes a busy machine a minute, and counts for the first test."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def works(folder: Path) -> list[Work]:
    return make_work(Oracle(folder), random.Random(3), 16, (20, 200), (60, 150))


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Fleet]:
    """1P1D behind two routers: whoever is missing is missed."""
    flags = {"num_pages": 100, "chunk_size": 64, "lease_s": 2, "longest_post_s": 0.5}
    with fleet(
        folder, prefill=1, decode=1, routers=2, node_flags=flags, router_flags=PATIENT
    ) as made:
        yield made


def pids_but(running: Fleet, name: str) -> dict[str, int]:
    return {n: member.pid for n, member in running.members.items() if n != name}


@pytest.mark.parametrize("again", range(2))
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_the_only_node_of_its_role_comes_back(
    name: str, again: int, running: Fleet, works: list[Work]
) -> None:
    """Killed under load, started where it was: what was under way goes on, nobody else restarts."""

    async def run() -> None:
        others = pids_but(running, name)
        async with showing_logs(running), Load([running.url], works) as load:
            while load.heard < 40:
                await asyncio.sleep(0.005)
            running[name].kill()
            running[name].start()
            await load.finish()
            for stream in load.streams:
                assert stream.is_right, stream.describe()
            await running.ready()
            await all_idle(running)
        assert pids_but(running, name) == others

    asyncio.run(run())


def test_a_router_dies_and_the_other_ones_streams_do_not_notice(
    running: Fleet, works: list[Work]
) -> None:
    """The nodes abort what it owned, and take work from it again once it is back."""

    async def run() -> None:
        first, second = running.routers
        async with (
            showing_logs(running),
            Load([first.url], works[:8]) as lost,
            Load([second.url], works[8:]) as kept,
        ):
            while not (lost.heard > 20 and kept.heard > 20):
                await asyncio.sleep(0.005)
            first.kill()
            await asyncio.gather(lost.finish(), kept.finish())
            for stream in kept.streams:
                assert stream.is_right, stream.describe()
            for stream in lost.streams:
                assert stream.ended_truly, stream.describe()
            assert any(stream.end is End.CUT for stream in lost.streams)
            async with client(second.url) as session:
                await session.wait_idle()
                assert await session.counter("aborts") > 0
            first.start()
            await running.ready()
            await right_through_each(running, works[0])
            await all_idle(running)

    asyncio.run(run())


def test_an_abort_through_one_router_ends_the_other_ones_request(
    running: Fleet, works: list[Work]
) -> None:
    """By its exact id: the nodes know it, and tell the router that owns it."""

    async def run() -> None:
        first, second = running.routers
        async with (
            showing_logs(running),
            client(second.url) as session,
            Load([first.url], works[:4]) as load,
        ):
            victim, *others = load.streams
            while not victim.tokens:
                await asyncio.sleep(0.005)
            status, answer = await session.post("/abort_request", {"rid": victim.rid})
            assert status == 200, answer
            await load.finish()
            assert victim.end is End.ABORTED, victim.describe()
            assert victim.is_prefix
            for stream in others:
                assert stream.is_right, stream.describe()
            await session.wait_idle()

    asyncio.run(run())


def test_both_routers_fill_the_same_nodes(running: Fleet, works: list[Work]) -> None:
    async def run() -> None:
        async with showing_logs(running):
            urls = [router.url for router in running.routers]
            loads = [Load([url], works) for url in urls]
            async with loads[0], loads[1]:
                await asyncio.gather(*(load.finish() for load in loads))
            for load in loads:
                for stream in load.streams:
                    assert stream.is_right, stream.describe()
            await all_idle(running)

    asyncio.run(run())


async def right_through_each(running: Fleet, work: Work) -> None:
    for router in running.routers:
        async with client(router.url) as session:
            assert await session.tokens(work.prompt, len(work.answer)) == work.answer


async def all_idle(running: Fleet) -> None:
    async with client(running.url) as session:

        async def same(session: Client = session) -> bool:
            return await session.all_idle()

        await eventually(same, 30.0, session.nodes)
