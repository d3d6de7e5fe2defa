"""pause_generation and continue_generation on a real cluster, on single nodes and on all."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_fixture import Cluster, cluster
from tests.integration.client import Client, client
from tests.integration.oracle import Oracle, random_prompt
from tests.tiny_models import make_tiny_model

MODES = ("abort", "retract", "in_place")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    return make_tiny_model("llama", folder, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Cluster]:
    """1P1D; prefill computes four requests at a time."""
    with cluster(
        folder,
        dtype="float32",
        num_pages=1300,
        chunk_size=64,
        max_running_requests=40,
        prefill_args="--max-running-requests 4",
    ) as c:
        yield c


async def node_names(session: Client) -> dict[str, str]:
    return {node["role"]: node["name"] for node in await session.nodes()}


async def pause(session: Client, mode: str, node: str | None = None) -> None:
    status, answer = await session.post("/pause_generation", {"mode": mode, "node": node})
    assert status == 200, answer


async def go_on(session: Client, node: str | None = None) -> None:
    status, answer = await session.post("/continue_generation", {"node": node})
    assert status == 200, answer


def test_each_mode_on_idle_nodes_and_again(running: Cluster) -> None:
    async def run() -> None:
        async with client(running.url) as session:
            names = await node_names(session)
            for target in (names["prefill"], names["decode"], None):
                for mode in MODES:
                    await pause(session, mode, target)
                    await pause(session, mode, target)
                    await go_on(session, target)
                    assert len(await session.tokens([5, 6, 7], 3)) == 3
            await session.wait_idle()

    asyncio.run(run())


@pytest.mark.parametrize("through", ["node", "router"])
def test_sixteen_retract_cycles_on_prefill_under_load(
    running: Cluster, folder: Path, through: str
) -> None:
    """sglang#20273: 64 workers loop long prompts with one new token; afterwards nothing is left."""
    oracle = Oracle(folder)
    chance = random.Random(20273)
    prompts = [random_prompt(chance, 200) for _ in range(8)]

    async def run() -> None:
        async with client(running.url) as session:
            stop = asyncio.Event()
            prefill = next(n for n in await session.nodes() if n["role"] == "prefill")

            async def worker(number: int) -> int:
                prompt, done = prompts[number % len(prompts)], 0
                while not stop.is_set():
                    assert await session.tokens(prompt, 1) == oracle.answer(prompt, 1)
                    done += 1
                return done

            workers = [asyncio.create_task(worker(n)) for n in range(64)]
            async with client(prefill["url"]) as node:
                target = node if through == "node" else session
                for _ in range(16):
                    await asyncio.sleep(0.1)
                    await pause(target, "retract", None if through == "node" else prefill["name"])
                    info = await session.node_info(prefill)
                    assert info["stats"].get("running", 0) == 0
                    await go_on(target, None if through == "node" else prefill["name"])
            stop.set()
            assert sum(await asyncio.gather(*workers)) > 64
            await session.post("/abort_request", {"abort_all": True})
            await session.wait_idle(5)
            await pause(session, "retract", prefill["name"])
            await go_on(session, prefill["name"])
            assert await session.tokens(prompts[0], 3) == oracle.answer(prompts[0], 3)

    asyncio.run(run())


def test_in_place_nothing_finishes_and_all_finish_afterwards(
    running: Cluster, folder: Path
) -> None:
    oracle = Oracle(folder)
    chance = random.Random(5)
    prompts = [random_prompt(chance, 8) for _ in range(32)]

    async def run() -> list[list[int]]:
        async with client(running.url) as session:
            names = await node_names(session)
            heard = 0

            def on_chunk(_: int) -> None:
                nonlocal heard
                heard += 1

            streams = [asyncio.create_task(session.stream(p, 512, on_chunk)) for p in prompts]
            while heard < 200:
                await asyncio.sleep(0.01)
            await pause(session, "in_place", names["prefill"])
            await pause(session, "in_place", names["decode"])
            await asyncio.sleep(0.5)
            before = heard
            await asyncio.sleep(5)
            assert heard == before
            assert not any(stream.done() for stream in streams)
            await go_on(session, names["decode"])
            await go_on(session, names["prefill"])
            answers = await asyncio.gather(*streams)
            await session.wait_idle()
            return answers

    for prompt, answer in zip(prompts, asyncio.run(run()), strict=True):
        assert answer == oracle.answer(prompt, 512)


def test_abort_while_paused_ends_every_stream(running: Cluster) -> None:
    async def run() -> None:
        async with client(running.url) as session:
            streams = [
                asyncio.create_task(session.post("/generate", body))
                for body in (
                    {
                        "input_ids": [7, 8, n + 3],
                        "rid": f"abort-{n}",
                        "sampling_params": {"max_new_tokens": 480, "ignore_eos": True},
                    }
                    for n in range(8)
                )
            ]
            await asyncio.sleep(0.3)
            await pause(session, "in_place")
            await session.post("/abort_request", {"rid": "abort-3"})
            status, answer = await streams[3]
            assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
            await session.post("/abort_request", {"abort_all": True})
            for _, answer in await asyncio.gather(*streams):
                assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            await session.wait_idle()
            await go_on(session)

    asyncio.run(run())


@pytest.mark.parametrize("target", ["decode", "cluster"])
def test_retract_in_mid_stream_leaves_the_texts_alone(
    running: Cluster, folder: Path, target: str
) -> None:
    oracle = Oracle(folder)
    chance = random.Random(target)
    work = [(random_prompt(chance, chance.randint(1, 100)), 150) for _ in range(12)]

    async def run() -> list[list[int]]:
        async with client(running.url) as session:
            name = None if target == "cluster" else (await node_names(session))["decode"]
            heard = 0

            def on_chunk(_: int) -> None:
                nonlocal heard
                heard += 1

            before = await session.counter("retractions")
            streams = [asyncio.create_task(session.stream(p, n, on_chunk)) for p, n in work]
            for threshold in (100, 500, 900):
                while heard < threshold:
                    await asyncio.sleep(0.01)
                await pause(session, "retract", name)
                if target == "cluster":
                    await session.wait_idle(5)
                    status, answer = await session.post("/flush_cache")
                    assert status == 200, answer
                await go_on(session, name)
            answers = await asyncio.gather(*streams)
            await session.wait_idle()
            assert await session.counter("retractions") > before
            return answers

    for (prompt, count), answer in zip(work, asyncio.run(run()), strict=True):
        assert answer == oracle.answer(prompt, count)
