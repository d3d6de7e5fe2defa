"""The default router and real nodes: prompts go where their pages are, and the work stays even."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.load import Work
from tests.faults.matrix import PATIENT
from tests.integration.client import Client, client, eventually
from tests.integration.oracle import Oracle, random_prompt
from tests.integration.prefix_rig import cached_pages, cached_tokens, flush, role_counter
from tests.processes import Fleet, fleet, showing_logs
from tests.tiny_models import make_tiny_model

PAGE = 8
"""Not the size that nodes have by default."""
PROMPTS, STRANGERS = 12, 60

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("routing") / "model")


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Fleet]:
    """Decode computes no prompt, so that every prompt asks something of both roles."""
    flags = {"page_size": PAGE, "num_pages": 1024}
    alone = {**PATIENT, "local_prefill_tokens": 0}
    with fleet(model, prefill=2, decode=2, node_flags=flags, router_flags=alone) as made:
        yield made


async def told(session: Client) -> None:
    """Until the router knows of every page that a node has cached."""

    async def knows_all() -> bool:
        known = await session.samples("pdserve_router_index_node_pages")
        return sum(known.values()) == await cached_pages(session)

    await eventually(knows_all, 30)


def test_a_prompt_goes_where_its_pages_are(running: Fleet, model: Path) -> None:
    chance, oracle = random.Random(3), Oracle(model)
    prompts = [random_prompt(chance, chance.randint(5 * PAGE, 9 * PAGE)) for _ in range(PROMPTS)]
    works = [Work(prompt, oracle.answer(prompt, 4)) for prompt in prompts]

    async def run() -> None:
        async with showing_logs(running), client(running.url) as session:
            await flush(session)
            first = await asyncio.gather(*(cached_tokens(session, work) for work in works))
            assert first == [0] * PROMPTS
            await session.wait_idle()
            for _ in range(2):
                await told(session)
                before = await role_counter(session, "decode", "cache_hit_tokens")
                for work in works:
                    whole = (len(work.prompt) - 1) // PAGE * PAGE
                    assert await cached_tokens(session, work) == whole
                hits = await role_counter(session, "decode", "cache_hit_tokens") - before
                assert hits == sum((len(prompt) - 1) // PAGE * PAGE for prompt in prompts)
                await session.wait_idle()

    asyncio.run(run())


def test_one_system_prompt_makes_no_hot_spot(running: Fleet) -> None:
    chance = random.Random(4)
    system = random_prompt(chance, 20 * PAGE)
    prompts = [system + random_prompt(chance, chance.randint(8, 24)) for _ in range(STRANGERS)]

    async def run() -> None:
        async with showing_logs(running), client(running.url) as session:
            await flush(session)
            before = await session.let_in()
            places = asyncio.Semaphore(8)

            async def one(prompt: list[int]) -> None:
                async with places:
                    await session.tokens(prompt, 8)

            await asyncio.gather(*map(one, prompts))
            after = await session.let_in()
            given = {name: after[name] - before[name] for name in after}
            for role in ("prefill", "decode"):
                counts = [count for name, count in given.items() if name.startswith(role)]
                assert sum(counts) == STRANGERS
                assert max(counts) <= 1.5 * min(counts), given
            saved = await role_counter(session, "prefill", "cache_hit_tokens")
            assert saved > (STRANGERS - 20) * len(system)

    asyncio.run(run())
