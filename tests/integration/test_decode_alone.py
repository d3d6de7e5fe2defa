"""Decode nodes that compute prompts themselves: as a whole cluster, and while no prefill node is
there. Every text is transformers'."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster_fixture import cluster
from tests.faults.matrix import MODEL, PATIENT
from tests.integration.client import Client, client, eventually
from tests.integration.oracle import Oracle, random_prompt
from tests.processes import Fleet, fleet
from tests.tiny_models import make_tiny_model

PAGE, CHUNK = 16, 48
SHORT = 32
ALONE = PATIENT | {"decode_alone": True}
FLAGS = {"page_size": PAGE, "chunk_size": CHUNK, "num_pages": 300}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So heavy that a chunk beside a running stream takes milliseconds."""
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama", **MODEL)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


async def attempts(session: Client, path: str) -> int:
    """How many the router has begun on a path."""
    _, text = await session.get("/metrics")
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith(f'pdserve_router_attempts_total{{path="{path}"}}')
    )
    return int(float(line.rpartition(" ")[2]))


async def prefilling(session: Client) -> int:
    """Requests whose prompt decode nodes are computing."""
    infos = [await session.node_info(node) for node in await session.nodes()]
    return sum(info["stats"]["queues"].get("prefilling", 0) for info in infos)


def test_a_cluster_without_prefill_nodes_is_an_aggregated_server(
    folder: Path, oracle: Oracle
) -> None:
    chance = random.Random(0)
    lengths = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 300)
    work = [(random_prompt(chance, length), 24) for length in lengths]

    async def run(url: str) -> None:
        async with client(url) as session:
            one_by_one = [await session.tokens(p, n) for p, n in work]
            together = await asyncio.gather(*(session.stream(p, n) for p, n in work))
            body = {"prompt": work[3][0], "max_tokens": 9, "n": 3, "temperature": 0, "seed": 1}
            status, answer = await session.post("/v1/completions", body)
            assert status == 200, answer
            assert len({choice["text"] for choice in answer["choices"]}) == 1
            expected = [oracle.answer(p, n) for p, n in work]
            assert one_by_one == expected
            assert together == expected
            assert await attempts(session, "disaggregated") == 0
            assert await session.counter("local_prefill_tokens") > 0
            await session.wait_idle()

    with cluster(
        folder,
        prefill=0,
        router_args="--decode-alone",
        decode_args="--local-chunk-size 8",
        num_pages=300,
        page_size=PAGE,
        chunk_size=CHUNK,
    ) as c:
        asyncio.run(run(c.url))


@pytest.fixture(scope="module")
def lone_pair(folder: Path) -> Iterator[Fleet]:
    """Two decode nodes; beside a running stream a step takes two tokens of a prompt."""
    with fleet(
        folder,
        prefill=0,
        decode=2,
        node_flags=FLAGS,
        decode_flags={"local_chunk_size": 2},
        router_flags=ALONE,
    ) as running:
        yield running


async def strike(
    session: Client, oracle: Oracle, disturb: Callable[[], Awaitable[None]], seed: int
) -> None:
    """Streams run and long prompts are being computed beside them when `disturb` happens."""
    chance = random.Random(seed)
    work = [(random_prompt(chance, 5), 150) for _ in range(4)]
    work += [(random_prompt(chance, 300), 20) for _ in range(6)]
    heard = 0

    def on_chunk(_: int) -> None:
        nonlocal heard
        heard += 1

    async def seen() -> bool:
        return await prefilling(session) > 0

    streams = [asyncio.create_task(session.stream(p, n, on_chunk)) for p, n in work[:4]]
    while heard < 20:
        await asyncio.sleep(0.01)
    streams += [asyncio.create_task(session.stream(p, n)) for p, n in work[4:]]
    await eventually(seen, 30)
    await disturb()
    answers = await asyncio.gather(*streams)
    for (prompt, count), answer in zip(work, answers, strict=True):
        assert answer == oracle.answer(prompt, count), f"{len(prompt)} tokens"


def test_retraction_in_mid_prefill_leaves_the_texts_alone(lone_pair: Fleet, oracle: Oracle) -> None:
    async def run() -> None:
        async with client(lone_pair.url) as session:

            async def pause() -> None:
                for mode in ("in_place", "retract"):
                    status, answer = await session.post("/pause_generation", {"mode": mode})
                    assert status == 200, answer
                await session.wait_idle(10)
                assert (await session.post("/continue_generation"))[0] == 200

            before = await session.counter("retractions")
            await strike(session, oracle, pause, seed=1)
            assert await session.counter("retractions") > before
            await session.wait_idle()

    asyncio.run(run())


def test_kill_9_in_mid_prefill(lone_pair: Fleet, oracle: Oracle) -> None:
    async def run() -> None:
        async with client(lone_pair.url) as session:

            async def kill() -> None:
                lone_pair["decode-1"].kill()

            await strike(session, oracle, kill, seed=2)
            await session.wait_idle()

    asyncio.run(run())


def test_requests_go_on_without_the_prefill_node_and_use_it_again(
    folder: Path, oracle: Oracle
) -> None:
    chance = random.Random(3)

    def prompts(count: int) -> list[list[int]]:
        return [random_prompt(chance, chance.randint(40, 200)) for _ in range(count)]

    async def ask(session: Client, asked: list[list[int]]) -> None:
        answers = await asyncio.gather(*(session.stream(prompt, 30) for prompt in asked))
        assert answers == [oracle.answer(prompt, 30) for prompt in asked]

    async def run(running: Fleet) -> None:
        async with client(running.url) as session:
            await ask(session, prompts(4))
            assert await attempts(session, "local") == 0
            await ask(session, [random_prompt(chance, length) for length in (1, SHORT - 1, SHORT)])
            assert await attempts(session, "local") == 3, "what is short needs no prefill node"
            under_way = asyncio.create_task(ask(session, prompts(8)))
            await asyncio.sleep(0.1)
            running["prefill-0"].kill()
            await under_way
            await ask(session, prompts(4))
            assert await attempts(session, "local") >= 3 + 4
            assert (await session.get("/health/ready"))[0] == 200
            running["prefill-0"].start()
            await running.ready()
            local, paired = [await attempts(session, p) for p in ("local", "disaggregated")]
            await ask(session, prompts(4))
            assert await attempts(session, "local") == local
            assert await attempts(session, "disaggregated") == paired + 4
            await session.wait_idle()

    flags = ALONE | {"local_prefill_tokens": SHORT}
    with fleet(folder, prefill=1, decode=1, node_flags=FLAGS, router_flags=flags) as running:
        asyncio.run(run(running))
