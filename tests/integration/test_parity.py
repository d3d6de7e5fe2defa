"""Greedy float32 output through real processes over NIXL equals transformers', token for token."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.cluster_fixture import cluster
from tests.integration.client import client
from tests.integration.oracle import Oracle, random_prompt
from tests.tiny_models import KINDS, MAX_POSITIONS, make_tiny_model

PAGE, CHUNK = 16, 48


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_at_every_awkward_length(kind: str, tmp_path: Path) -> None:
    folder = make_tiny_model(kind, tmp_path / kind)
    oracle = Oracle(folder)
    chance = random.Random(kind)
    lengths = (1, PAGE - 1, PAGE, PAGE + 1, 3 * CHUNK + 5, MAX_POSITIONS - 1)
    prompts = [random_prompt(chance, length) for length in lengths]
    counts = [min(20, MAX_POSITIONS - length) for length in lengths]

    async def ask(url: str) -> list[list[int]]:
        async with client(url) as session:
            asked = [session.tokens(p, n) for p, n in zip(prompts, counts, strict=True)]
            answers = await asyncio.gather(*asked)
            await session.wait_idle()
            return answers

    with cluster(folder, dtype="float32", page_size=PAGE, chunk_size=CHUNK, num_pages=200) as c:
        answers = asyncio.run(ask(c.url))
    for prompt, count, answer in zip(prompts, counts, answers, strict=True):
        assert answer == oracle.answer(prompt, count), f"{kind}, {len(prompt)} tokens"


def test_64_requests_on_2_and_2_nodes_whose_pools_are_too_small(tmp_path: Path) -> None:
    """So small that decode has to retract; nobody's text may show it."""
    folder = make_tiny_model("llama", tmp_path / "llama")
    oracle = Oracle(folder)
    chance = random.Random(64)
    work = [
        (random_prompt(chance, chance.choice([1, 15, 16, 17, 60, 120])), chance.randint(30, 90))
        for _ in range(64)
    ]

    async def ask(url: str) -> tuple[list[list[int]], int]:
        async with client(url) as session:
            answers = await asyncio.gather(*(session.stream(p, n) for p, n in work))
            await session.wait_idle()
            return answers, await session.counter("retractions")

    with cluster(
        folder,
        prefill=2,
        decode=2,
        dtype="float32",
        page_size=PAGE,
        chunk_size=CHUNK,
        num_pages=18,
        decode_args="--reserve-pages 0",
    ) as c:
        answers, retractions = asyncio.run(ask(c.url))
    assert retractions > 0
    for number, ((prompt, count), answer) in enumerate(zip(work, answers, strict=True)):
        assert answer == oracle.answer(prompt, count), f"request {number}"
