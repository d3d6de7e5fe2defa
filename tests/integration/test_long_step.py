"""A step that lasts longer than every heartbeat limit is work, not a death.

Each forward pass of prefill stands still for several times the limits. Heartbeats come from a
thread of their own, so nobody gives anybody up.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults.slow_prefill import STEP_S
from tests.integration.client import Client, client
from tests.integration.oracle import Oracle, random_prompt
from tests.processes import Fleet, fleet, showing_logs
from tests.tiny_models import make_tiny_model

LIMIT_S = 2.0
LIMITS: dict[str, object] = {
    "router_timeout_s": LIMIT_S,
    "peer_timeout_s": LIMIT_S,
    "heartbeat_s": 0.1,
}
LONG_S = 2.5 * LIMIT_S
PROMPT_TOKENS, ANSWER_TOKENS, REQUESTS = 60, 8, 3


async def longest_silence(session: Client, running: Fleet, done: asyncio.Event) -> float:
    """The greatest age of prefill's last finished turn, seen until `done`."""
    worst = 0.0
    while not done.is_set():
        info = await session.node_info({"url": running["prefill-0"].url})
        worst = max(worst, info["step_age_s"])
        await asyncio.sleep(0.02)
    return worst


async def losses(session: Client, running: Fleet) -> dict[str, Any]:
    """What anybody counted as a loss or had to do again."""
    found: dict[str, Any] = {}
    for node in running.nodes:
        info = await session.node_info({"url": node.url})
        counts = info["counters"] | info["stats"].get("counters", {})
        found |= {
            f"{node.name} {what}": counts[what]
            for what in ("lost_routers", "silent_peers", "peers_lost", "retractions", "aborts")
            if counts.get(what)
        }
    return found


def test_a_step_that_outlasts_the_time_outs_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_S, str(LONG_S))
    model = make_tiny_model("llama", tmp_path / "llama")
    oracle = Oracle(model)
    chance = random.Random(11)
    prompts = [random_prompt(chance, PROMPT_TOKENS) for _ in range(REQUESTS)]

    async def run(running: Fleet) -> None:
        async with showing_logs(running), client(running.url) as session:
            await session.tokens(prompts[0], ANSWER_TOKENS)  # the links stand, and all is warm
            done = asyncio.Event()
            watch = asyncio.create_task(longest_silence(session, running, done))
            asked = [session.stream(prompt, ANSWER_TOKENS) for prompt in prompts]
            answers = await asyncio.gather(*asked)
            done.set()
            assert await watch > 1.5 * LIMIT_S, "the steps were short, which proves nothing"
            assert await losses(session, running) == {}
            await session.wait_idle()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == oracle.answer(prompt, ANSWER_TOKENS)

    with fleet(
        model,
        prefill=1,
        decode=1,
        router_flags={"heartbeat_s": 0.1, "node_timeout_s": LIMIT_S},
        node_flags=LIMITS,
        prefill_module="tests.faults.slow_prefill",
    ) as running:
        asyncio.run(run(running))
