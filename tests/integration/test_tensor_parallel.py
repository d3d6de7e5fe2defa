"""Nodes whose model is shared by ranks: over gloo and NIXL every token is transformers', whatever
the two roles' numbers of ranks are, and whatever happens to a rank."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster_fixture import Cluster, cluster
from tests.integration.client import Client, client, eventually
from tests.integration.lora_rig import Wardrobe, load_all, make_wardrobe
from tests.integration.oracle import Oracle, random_prompt
from tests.tiny_models import make_tiny_model

PAGE, CHUNK = 16, 48
FLAGS: dict[str, Any] = {
    "dtype": "float32", "page_size": PAGE, "chunk_size": CHUNK, "num_pages": 200,
}  # fmt: skip
RANK_TIMEOUT_S = 10.0
NINE_HEADS = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
"""As SmolLM2-135M has them: two ranks have unequal parts."""

pytestmark = pytest.mark.timeout(300)
"""Starting five processes takes a busy machine a while."""


@pytest.mark.parametrize(
    ("prefill", "decode", "kind", "overrides"),
    [
        (1, 2, "smollm2", {}),  # one KV head: both ranks have it
        (2, 1, "qwen3", {}),
        (3, 2, "llama", NINE_HEADS),
    ],
    ids=["1-to-2", "2-to-1", "3-to-2"],
)
def test_roles_may_differ_in_their_ranks(
    prefill: int, decode: int, kind: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny_model(kind, tmp_path / kind, **overrides)
    oracle = Oracle(folder)
    chance = random.Random(kind)
    lengths = (1, PAGE - 1, PAGE, PAGE + 1, 3 * CHUNK + 5, 200)
    prompts = [random_prompt(chance, length) for length in lengths]

    async def ask(url: str) -> list[list[int]]:
        async with client(url) as session:
            answers = await asyncio.gather(*(session.tokens(p, 20) for p in prompts))
            await session.wait_idle()
            return answers

    flags = FLAGS | {"prefill_args": f"--tp {prefill}", "decode_args": f"--tp {decode}"}
    with cluster(folder, **flags) as c:
        answers = asyncio.run(ask(c.url))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == oracle.answer(prompt, 20), f"{len(prompt)} tokens"


# ---------------------------------------------------------------- two and two


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Wardrobe:
    root = tmp_path_factory.mktemp("shared")
    return make_wardrobe(make_tiny_model("llama", root / "model"), root / "adapters")


@pytest.fixture(scope="module")
def running(shared: Wardrobe) -> Iterator[Cluster]:
    """1P1D, both of two ranks."""
    args = f"--rank-timeout-s {RANK_TIMEOUT_S}"
    flags = FLAGS | {"tp": 2, "prefill_args": args, "decode_args": args}
    # A busy machine takes long to start a node again.
    with cluster(shared.model, **flags, router_args="--node-wait-s 120") as c:
        yield c


def test_adapters_and_the_base_model_in_one_batch(running: Cluster, shared: Wardrobe) -> None:
    chance = random.Random(6)
    names = [None, *shared.adapters] * 2
    prompts = [random_prompt(chance, chance.randint(1, 120)) for _ in names]

    async def ask() -> list[list[int]]:
        async with client(running.url) as session:
            await load_all(session, shared)
            pairs = zip(prompts, names, strict=True)
            answers = await asyncio.gather(*(session.tokens(p, 24, n) for p, n in pairs))
            await session.wait_idle()
            return answers

    for prompt, name, answer in zip(prompts, names, asyncio.run(ask()), strict=True):
        assert answer == shared.answer(prompt, 24, name), name


def test_prompt_logprobs_come_from_all_ranks(running: Cluster, shared: Wardrobe) -> None:
    """One product more that every rank has to take part in; a batch without it follows."""
    prompt = random_prompt(random.Random(7), 150)

    async def ask() -> tuple[int, Any]:
        async with client(running.url) as session:
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
            answer = await session.post("/v1/completions", body)
            assert await session.tokens(prompt, 4) == shared.answer(prompt, 4)
            return answer

    status, answer = asyncio.run(ask())
    assert status == 200, answer
    assert len(answer["choices"][0]["prompt_logprobs"]) == len(prompt)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
def test_pause_in_mid_stream(running: Cluster, shared: Wardrobe, mode: str) -> None:
    chance = random.Random(mode)
    work = [(random_prompt(chance, chance.randint(1, 100)), 100) for _ in range(6)]

    async def run() -> list[list[int]]:
        async with client(running.url) as session:
            streams = await session.in_mid_stream(work)
            status, answer = await session.post("/pause_generation", {"mode": mode})
            assert status == 200, answer
            if mode == "retract":
                await session.wait_idle()
                status, answer = await session.post("/flush_cache")
                assert status == 200, answer
            status, answer = await session.post("/continue_generation")
            assert status == 200, answer
            answers = await asyncio.gather(*streams)
            await session.wait_idle()
            return answers

    for (prompt, count), answer in zip(work, asyncio.run(run()), strict=True):
        wanted = shared.answer(prompt, count)
        if mode == "abort":
            assert answer == wanted[: len(answer)]
        else:
            assert answer == wanted


@pytest.mark.parametrize(
    ("role", "number"),
    [
        ("decode", signal.SIGKILL),
        ("prefill", signal.SIGKILL),
        # Nobody sees its end: the others wait for it in the middle of a step, and then give up.
        ("decode", signal.SIGSTOP),
    ],
)
def test_a_lost_rank_is_a_lost_node(
    running: Cluster, shared: Wardrobe, role: str, number: signal.Signals
) -> None:
    """The supervisor starts the whole node anew; what it had begun is replayed."""
    chance = random.Random(role)
    work = [(random_prompt(chance, chance.randint(1, 200)), 150) for _ in range(6)]

    async def run() -> list[list[int]]:
        async with client(running.url) as session:
            streams = await session.in_mid_stream(work)
            victim = next(n for n in await session.nodes() if n["role"] == role)
            node = psutil.Process(victim["pid"])
            (rank,) = node.children()
            os.kill(rank.pid, number)
            notice_s = RANK_TIMEOUT_S if number is signal.SIGSTOP else 0.0
            await asyncio.to_thread(psutil.wait_procs, [node, rank], notice_s + 5.0)
            assert not node.is_running()
            assert not rank.is_running()
            answers = await asyncio.gather(*streams)
            await eventually(lambda: replaced(session, victim), 60, session.nodes)
            prompt, count = work[0]
            assert await session.tokens(prompt, count) == answers[0]
            await session.wait_idle()
            return answers

    for (prompt, count), answer in zip(work, asyncio.run(run()), strict=True):
        assert answer == shared.answer(prompt, count)


async def replaced(session: Client, victim: dict[str, Any]) -> bool:
    """Another process has joined in its place."""
    same = [node for node in await session.nodes() if node["role"] == victim["role"]]
    return len(same) == 1 and same[0]["pid"] != victim["pid"]
