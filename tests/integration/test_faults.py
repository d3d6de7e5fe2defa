"""Nodes killed in mid-stream on 2P2D: every client's text equals the undisturbed run."""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_fixture import cluster
from tests.integration.client import Client, client, eventually
from tests.integration.oracle import Oracle, random_prompt
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_kill_9_in_mid_stream(role: str, tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "llama")
    oracle = Oracle(folder)
    chance = random.Random(9)
    work = [(random_prompt(chance, chance.randint(1, 250)), 200) for _ in range(20)]

    async def run(url: str) -> list[list[int]]:
        async with client(url) as session:
            streams = await session.in_mid_stream(work)
            victim = next(n for n in await session.nodes() if n["role"] == role)
            os.kill(victim["pid"], signal.SIGKILL)
            answers = await asyncio.gather(*streams)
            await eventually(lambda: replaced(session, victim), 60, session.nodes)
            prompt, count = work[0]
            assert await session.tokens(prompt, count) == answers[0]
            await session.wait_idle(60)
            return answers

    with cluster(folder, prefill=2, decode=2, dtype="float32", num_pages=400, chunk_size=64) as c:
        answers = asyncio.run(run(c.url))
    for (prompt, count), answer in zip(work, answers, strict=True):
        assert answer == oracle.answer(prompt, count)


async def replaced(session: Client, victim: dict[str, Any]) -> bool:
    """The supervisor has started another process in its place, and it has joined."""
    same = [n for n in await session.nodes() if n["role"] == victim["role"]]
    return len(same) == 2 and all(n["pid"] != victim["pid"] for n in same)
