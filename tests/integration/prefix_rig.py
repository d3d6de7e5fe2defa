"""Conversations that share beginnings of every length, with their only right answers; and what
nodes say of their caches."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from tests.faults.load import Work
from tests.integration.client import Client, eventually
from tests.integration.lora_rig import Wardrobe
from tests.integration.oracle import random_prompt

PAGE = 8
CACHE_TIMEOUT_S = 20.0

Conversation = list[Work]
Ask = Callable[[Work], Awaitable[list[int]]]


def make_conversations(
    wardrobe: Wardrobe, chance: random.Random, adapters: Sequence[str | None], turns: int = 3
) -> list[Conversation]:
    """One for each length of a shared beginning from one page to three, asked of the adapters in
    turn. A turn goes on from the answer before it, or, sometimes, from the middle of it all."""
    trunk = random_prompt(chance, 3 * PAGE)
    made = []
    for number in range(2 * PAGE + 1):
        adapter = adapters[number % len(adapters)]
        prompt = trunk[: PAGE + number] + random_prompt(chance, chance.randint(1, 3 * PAGE))
        conversation = []
        for _ in range(turns):
            answer = wardrobe.answer(prompt, chance.randint(1, 3 * PAGE), adapter)
            conversation.append(Work(prompt, answer, adapter))
            known = prompt + answer
            if chance.random() < 0.25:
                known = known[: chance.randint(PAGE, len(known))]
            prompt = known + random_prompt(chance, chance.randint(1, 2 * PAGE))
        made.append(conversation)
    return made


async def converse(ask: Ask, conversations: Iterable[Conversation]) -> list[str]:
    """All conversations at once, each turn after the one before; what was answered wrong."""
    wrong = []

    async def one(conversation: Conversation) -> None:
        for number, work in enumerate(conversation):
            got = await ask(work)
            if got != work.answer:
                asked = f"turn {number}, {len(work.prompt)} tokens, {work.adapter}"
                wrong.append(f"{asked}: {got}, not {work.answer}")

    await asyncio.gather(*(one(conversation) for conversation in conversations))
    return wrong


def asker(session: Client, chance: random.Random) -> Ask:
    """Streamed or not, as it comes."""

    async def ask(work: Work) -> list[int]:
        how = session.stream if chance.random() < 0.5 else session.tokens
        return await how(work.prompt, len(work.answer), adapter=work.adapter)

    return ask


async def cached_tokens(session: Client, work: Work) -> int:
    """Ask, see that the answer is right; what usage says of the prompt."""
    sampling = {"temperature": 0, "max_new_tokens": len(work.answer), "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": work.prompt, "sampling_params": sampling}
    if work.adapter is not None:
        body["lora_path"] = work.adapter
    status, answer = await session.post("/generate", body)
    assert status == 200, answer
    assert answer["output_ids"] == work.answer
    cached: int = answer["meta_info"]["cached_tokens"]
    return cached


async def role_counter(session: Client, role: str, name: str) -> int:
    """A scheduler's counter, over all nodes of a role."""
    nodes = [node for node in await session.nodes() if node["role"] == role]
    infos = [await session.node_info(node) for node in nodes]
    return sum(info["stats"].get("counters", {}).get(name, 0) for info in infos)


async def flush(session: Client) -> None:
    """Empty all caches, as soon as no request holds pages."""

    async def flushed() -> bool:
        status, _ = await session.post("/flush_cache")
        return status == 200

    await eventually(flushed, CACHE_TIMEOUT_S, session.nodes)


async def cached_pages(session: Client) -> int:
    """Of all nodes together."""
    infos = [await session.node_info(node) for node in await session.nodes()]
    return sum(info["stats"].get("cached_pages", 0) for info in infos)
