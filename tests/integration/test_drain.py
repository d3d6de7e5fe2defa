"""Leaving with real processes: nodes come and go under load, and no request fails by it."""

import asyncio
import contextlib
import json
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.faults.load import End, Load, Work, make_work
from tests.integration.client import client, eventually
from tests.integration.oracle import Oracle
from tests.processes import Fleet, Member, plan_fleet, showing_logs
from tests.tiny_models import make_tiny_model

STREAMS = 20
START_TIMEOUT_S = 90.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def works(folder: Path) -> list[Work]:
    distinct = make_work(Oracle(folder), random.Random(11), 5, (1, 200), (60, 120))
    return distinct * (STREAMS // len(distinct))


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Fleet]:
    """2P2D run; a third of each role is there to be started."""
    flags = {"num_pages": 300, "chunk_size": 64, "drain_s": 20}
    router = {"drain_s": 20}
    with tempfile.TemporaryDirectory(prefix="pdserve-drain-") as logs:
        made = plan_fleet(
            folder, Path(logs), prefill=3, decode=3, node_flags=flags, router_flags=router
        )
        try:
            yield made
        finally:
            made.close()


async def put_up(running: Fleet, *names: str) -> None:
    """Have exactly these nodes, and the router, running and usable."""
    for member in running.members.values():
        if member.is_alive and member.role != "router" and member.name not in names:
            member.kill()
    for name in ("router-0", *names):
        if not running[name].is_alive:
            running[name].start()
    await until_joined(running, *names)


async def until_joined(running: Fleet, *names: str) -> None:
    """Until the router can use these nodes, and no others but those that leave."""

    async def joined() -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with client(running.url) as session:
                nodes = {n["name"]: n for n in await session.nodes() if n["state"] == "ready"}
                pids = {name: node["pid"] for name, node in nodes.items()}
                linked = [n["linked_peers"] for n in nodes.values() if n["role"] == "decode"]
                prefills = sum(node["role"] == "prefill" for node in nodes.values())
                return (
                    pids == {name: running[name].pid for name in names}
                    and all(len(peers) == prefills for peers in linked)
                    and (await session.get("/health/ready"))[0] == 200
                )
        return False

    async def explain() -> str:
        return running.logs()

    await eventually(joined, START_TIMEOUT_S, explain)


@contextlib.asynccontextmanager
async def constant_load(running: Fleet, works: list[Work]) -> AsyncIterator[None]:
    """Twenty streams at any time; each must be right."""
    stop = asyncio.Event()

    async def one(work: Work) -> int:
        count = 0
        while not stop.is_set():
            async with Load([running.url], [work]) as load:
                await load.finish()
                assert load.streams[0].is_right, load.streams[0].describe()
            count += 1
        return count

    tasks = [asyncio.create_task(one(work)) for work in works]
    try:
        yield
    finally:
        stop.set()
        counts = await asyncio.gather(*tasks)
    assert min(counts) > 0


async def heard(load: Load, tokens: int) -> None:
    while load.heard < tokens:
        await asyncio.sleep(0.005)


async def leave(member: Member) -> float:
    """SIGTERM, and the end; the seconds it took."""
    before, began = member.log(), time.monotonic()
    member.signal(signal.SIGTERM)
    assert await member.ended() == 0, member.log_end()
    said = member.log().removeprefix(before)
    assert " drained" in said, said
    assert "not drained" not in said, said
    assert "Traceback" not in said, said
    return time.monotonic() - began


async def all_idle(running: Fleet) -> None:
    async with client(running.url) as session:
        await session.wait_idle()


@pytest.mark.timeout(480)
def test_nodes_come_and_go_under_load_and_no_request_fails(
    running: Fleet, works: list[Work]
) -> None:
    async def run() -> None:
        up = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
        await put_up(running, *up)
        async with showing_logs(running), constant_load(running, works):
            for spare, leaving in (
                ("prefill-2", "prefill-0"),
                ("decode-2", "decode-0"),
                ("prefill-0", "prefill-1"),
                ("decode-0", "decode-1"),
            ):
                running[spare].start()
                up.append(spare)
                await until_joined(running, *up)
                up.remove(leaving)
                await leave(running[leaving])
                await until_joined(running, *up)
        await all_idle(running)

    asyncio.run(run())


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_an_idle_node_leaves_at_once(running: Fleet, name: str) -> None:
    async def run() -> None:
        await put_up(running, "prefill-0", "prefill-1", "decode-0", "decode-1")
        async with showing_logs(running):
            await all_idle(running)
            assert await leave(running[name]) < 5.0  # most of it is the interpreter's end

    asyncio.run(run())


def test_a_paused_node_hands_everything_over_and_leaves(running: Fleet, works: list[Work]) -> None:
    async def run() -> None:
        await put_up(running, "prefill-0", "prefill-1", "decode-0", "decode-1")
        async with (
            showing_logs(running),
            client(running.url) as session,
            Load([running.url], works) as load,
        ):
            await heard(load, 100)
            await session.post("/pause_generation", {"mode": "in_place", "node": "decode-0"})
            before = running["decode-0"].log()
            status, answer = await session.post("/drain", {"node": "decode-0"})
            assert status == 200, answer
            assert await running["decode-0"].ended() == 0
            assert " drained" in running["decode-0"].log().removeprefix(before)
            await load.finish()
            for stream in load.streams:
                assert stream.is_right, stream.describe()
            await session.wait_idle()

    asyncio.run(run())


def test_asked_twice_a_node_ends_at_once_and_its_requests_go_on_elsewhere(
    running: Fleet, works: list[Work]
) -> None:
    async def run() -> None:
        await put_up(running, "prefill-0", "prefill-1", "decode-0", "decode-1")
        async with (
            showing_logs(running),
            client(running["decode-0"].url) as node,
            Load([running.url], works) as load,
        ):
            await heard(load, 100)
            status, _ = await node.post("/drain")
            assert status == 200
            assert (await node.get("/health/ready"))[0] == 503
            assert (await node.get("/health/live"))[0] == 200
            running["decode-0"].signal(signal.SIGTERM)  # the first signal, as after a preStop hook
            await asyncio.sleep(0.1)
            assert running["decode-0"].is_alive
            running["decode-0"].signal(signal.SIGTERM)
            assert await running["decode-0"].ended(10) == 0
            await load.finish()
            for stream in load.streams:
                assert stream.is_right, stream.describe()
            await all_idle(running)

    asyncio.run(run())


def test_a_router_asked_to_end_finishes_its_streams(running: Fleet, works: list[Work]) -> None:
    async def run() -> None:
        await put_up(running, "prefill-0", "prefill-1", "decode-0", "decode-1")
        router = running["router-0"]
        async with (
            showing_logs(running),
            client(running.url) as session,
            Load([running.url], works) as load,
        ):
            await heard(load, 100)
            router.signal(signal.SIGTERM)
            await eventually(lambda: refuses(running.url), 30)
            status, answer = await session.post("/generate", {"input_ids": [5]})
            assert (status, answer["error"]["code"]) == (503, "draining")
            await load.finish()
            for stream in load.streams:
                assert stream.is_right, stream.describe()
            assert await router.ended() == 0

    asyncio.run(run())


def test_a_router_asked_twice_ends_its_streams_with_an_error(
    running: Fleet, works: list[Work]
) -> None:
    async def run() -> None:
        await put_up(running, "prefill-0", "prefill-1", "decode-0", "decode-1")
        router = running["router-0"]
        async with showing_logs(running), Load([running.url], works) as load:
            await heard(load, 100)
            router.signal(signal.SIGTERM)
            await asyncio.sleep(0.05)
            router.signal(signal.SIGTERM)
            assert await router.ended(10) == 0
            await load.finish()
            for stream in load.streams:
                assert stream.is_right or (stream.end is End.ERROR and stream.is_prefix), (
                    stream.describe()
                )
                if stream.end is End.ERROR and stream.tokens:
                    assert json.loads(stream.error)["code"] == "shutting_down"
            assert any(stream.end is End.ERROR for stream in load.streams)

    asyncio.run(run())


async def refuses(url: str) -> bool:
    async with client(url) as session:
        status, answer = await session.get("/health/ready")
        return status == 503 and answer["reason"] == "the router is draining"
