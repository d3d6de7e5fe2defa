"""200 clients that go away at random moments, five times over: nothing stays behind."""

import asyncio
import random
from pathlib import Path

import aiohttp
import pytest

from tests.faults.load import End, Load, Work, make_work
from tests.faults.matrix import PATIENT
from tests.faults.resources import Baseline
from tests.integration.client import client
from tests.integration.oracle import Oracle
from tests.processes import Fleet, fleet
from tests.tiny_models import make_tiny_model

CLIENTS, ROUNDS = 200, 5
IDLE_TIMEOUT_S = 20.0
RSS_GROWTH_MIB = 24.0
"""Allowed from the end of the second round to that of the last: allocators settle slowly."""


async def leaves(url: str, work: Work, chance: random.Random) -> None:
    """Asks without streaming and closes the connection before the answer, or before the headers."""
    params = {"temperature": 0, "max_new_tokens": len(work.answer), "ignore_eos": True}
    body = {"input_ids": work.prompt, "sampling_params": params}
    try:
        async with asyncio.timeout(chance.choice([0.0, 0.01, 0.3, 1.5])):
            async with aiohttp.request("POST", url + "/generate", json=body) as response:
                answer = await response.json()
    except TimeoutError:
        return
    assert answer["output_ids"] == work.answer


async def one_round(url: str, works: list[Work], chance: random.Random) -> None:
    """Three quarters stream, of whom one in ten stays; all the others go at random."""
    chosen = [chance.choice(works) for _ in range(CLIENTS)]
    streaming, others = chosen[: 3 * CLIENTS // 4], chosen[3 * CLIENTS // 4 :]
    async with Load([url], streaming) as load:
        asking = [asyncio.create_task(leaves(url, work, chance)) for work in others]
        leaving = [number for number in range(len(streaming)) if chance.random() < 0.9]
        # Some go before the headers, some once their own stream has a few tokens.
        for number in leaving[::3]:
            await asyncio.sleep(chance.uniform(0, 0.02))
            load.leave(number)
        tokens = {number: chance.randint(1, 20) for number in leaving if number % 2}
        for number in leaving:
            wanted = tokens.get(number, 0)
            while load.streams[number].end is None and len(load.streams[number].tokens) < wanted:
                await asyncio.sleep(0.005)
            load.leave(number)
        await load.finish()
        await asyncio.gather(*asking)
    for stream in load.streams:
        assert stream.end is End.LEFT or stream.is_right, stream.describe()
        assert stream.is_prefix, stream.describe()
    assert any(stream.is_right for stream in load.streams)
    assert any(stream.end is End.LEFT and stream.tokens for stream in load.streams)


@pytest.mark.timeout(400)
def test_200_clients_leave_five_times(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")
    works = make_work(Oracle(folder), random.Random(5), 30, (1, 120), (20, 60))

    async def run(running: Fleet) -> None:
        chance = random.Random(200)
        baseline = Baseline()
        memory = []
        async with client(running.url) as session:
            for number in range(ROUNDS):
                await one_round(running.url, works, chance)
                await session.wait_idle(IDLE_TIMEOUT_S)
                if number == 0:
                    await baseline.widen(running)
                else:
                    grown = await baseline.settle(running)
                    assert not grown, f"round {number}: {grown}"
                memory.append({n: m.resources().rss_mib for n, m in running.members.items()})
                prompt, answer = works[number].prompt, works[number].answer
                assert await session.tokens(prompt, len(answer)) == answer
        for name, last in memory[-1].items():
            assert last - memory[1][name] < RSS_GROWTH_MIB, [held[name] for held in memory]

    flags = {"num_pages": 40, "chunk_size": 64}
    with fleet(folder, prefill=2, decode=2, node_flags=flags, router_flags=PATIENT) as running:
        asyncio.run(run(running))
