"""Adapters and the base model in one batch, over NIXL: every token is peft's, whatever happens."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from router.tokens import load_codec
from tests.faults.load import Load, Work
from tests.faults.matrix import PATIENT
from tests.integration.client import Client, client, eventually
from tests.integration.lora_rig import (
    Wardrobe,
    crowded_fleet,
    held_by,
    listed,
    load_all,
    nobody_uses_any,
)
from tests.integration.oracle import random_prompt
from tests.processes import Fleet, showing_logs

NODE_FLAGS = {"num_pages": 40, "chunk_size": 64}
"""Pools for about four requests: decode has to retract, and a dead node's pages come home soon."""

pytestmark = pytest.mark.timeout(300)
"""Starting a fleet takes a busy machine a minute, and counts for the first test."""


@pytest.fixture(scope="module")
def running(wardrobe: Wardrobe) -> Iterator[Fleet]:
    with crowded_fleet(wardrobe, NODE_FLAGS, PATIENT) as made:
        yield made


def test_three_adapters_and_the_base_model_while_nodes_retract_and_die(
    running: Fleet, wardrobe: Wardrobe, lora_works: list[Work]
) -> None:
    chance = random.Random(64)
    works = [work.cut(chance.randint(40, 120)) for work in lora_works * 3]

    async def run() -> None:
        async with showing_logs(running), client(running.url) as session:
            await load_all(session, wardrobe)
            async with Load(running.urls, works) as load:
                await eventually(lambda: all_on_one_decode_node(session, wardrobe), 30)
                await eventually(lambda: some_were_retracted(session), 30)
                for name in ("decode-1", "prefill-1"):
                    assert load.unfinished > 10
                    running[name].kill()
                    heard = load.heard
                    while load.unfinished and load.heard < heard + 100:
                        await asyncio.sleep(0.01)
                    running[name].start()
                await load.finish()
            assert [s.describe() for s in load.streams if not s.is_right] == []
            await running.ready()
            # A node that comes back has all adapters before it takes a request.
            for name, held in (await held_by(session)).items():
                assert held == set(wardrobe.adapters), name
            async with Load(running.urls, works[:40]) as load:
                await load.finish()
            assert [s.describe() for s in load.streams if not s.is_right] == []
            await session.wait_idle()
            await nobody_uses_any(session)

    asyncio.run(run())


async def all_on_one_decode_node(session: Client, wardrobe: Wardrobe) -> bool:
    """Whether a decode node holds requests of every adapter and of the base model."""
    for node in await session.nodes():
        stats = (await session.node_info(node))["stats"]
        users = stats.get("running_loras", {})
        mixed = set(users) == set(wardrobe.adapters)
        if node["role"] == "decode" and mixed and stats.get("running", 0) > 0:
            return bool(sum(stats["queues"].values()) > sum(users.values()))
    return False


async def some_were_retracted(session: Client) -> bool:
    return await session.counter("retractions") > 0


# ---------------------------------------------------------------- every way to name one


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("spelling", ["{name}", "tiny:{name}"])
def test_model_names_an_adapter(
    spelling: str, stream: bool, running: Fleet, wardrobe: Wardrobe
) -> None:
    codec = load_codec(wardrobe.model)
    prompt = random_prompt(random.Random(7), 40)
    chat = [{"role": "user", "content": "How many pages travel?"}]
    rendered = codec.encode_now(codec.render_chat(chat), add_special_tokens=False)
    asks: list[tuple[str, dict[str, Any], list[int]]] = [
        ("/v1/completions", {"prompt": prompt}, prompt),
        ("/v1/chat/completions", {"messages": chat}, rendered),
    ]

    async def run() -> None:
        async with showing_logs(running), client(running.url) as session:
            await load_all(session, wardrobe)
            texts = set()
            for path, body, ids in asks:
                for name in wardrobe.adapters:
                    model = spelling.format(name=name)
                    more = {"model": model, "max_tokens": 24, "temperature": 0}
                    whole = body | more | {"ignore_eos": True, "stream": stream}
                    text, answered = await ask_openai(session, path, whole)
                    wanted = wardrobe.answer(ids, 24, name)
                    assert text == codec.decode(wanted, skip_special_tokens=True), (path, model)
                    assert answered == {model}
                    texts.add(text)
            assert len(texts) == len(asks) * len(wardrobe.adapters)

    asyncio.run(run())


async def ask_openai(session: Client, path: str, body: dict[str, Any]) -> tuple[str, set[str]]:
    """The text, put together if it was streamed, and the models that it is said to be of."""
    if not body["stream"]:
        status, answer = await session.post(path, body)
        assert status == 200, answer
        return _text(answer["choices"][0]), {answer["model"]}
    text, models = "", set()
    async with aiohttp.request("POST", session.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                chunk = json.loads(data)
                text += "".join(_text(choice) for choice in chunk["choices"])
                models.add(chunk["model"])
    return text, models


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        found = choice["text"]
    else:
        found = (choice.get("message") or choice["delta"]).get("content")
    return found or ""


def test_generate_takes_an_adapter_for_all_prompts_or_for_each(
    running: Fleet, wardrobe: Wardrobe
) -> None:
    chance = random.Random(8)
    prompts = [random_prompt(chance, length) for length in (5, 40, 130, 16)]
    names = [*wardrobe.adapters, None]
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}

    async def ask(session: Client, lora_path: object, **more: object) -> list[list[int]]:
        body = {"input_ids": prompts, "sampling_params": sampling, "lora_path": lora_path}
        status, answers = await session.post("/generate", body | more)
        assert status == 200, answers
        return [answer["output_ids"] for answer in answers]

    async def run() -> None:
        async with showing_logs(running), client(running.url) as session:
            await load_all(session, wardrobe)
            pairs = zip(prompts, names, strict=True)
            assert await ask(session, names) == [wardrobe.answer(p, 20, n) for p, n in pairs]
            for name, path in wardrobe.adapters.items():
                wanted = [wardrobe.answer(p, 20, name) for p in prompts]
                assert await ask(session, name) == wanted
                assert await ask(session, str(path)) == wanted, "by the path it was loaded from"

    asyncio.run(run())


def test_models_tells_of_adapters_and_their_parent(running: Fleet, wardrobe: Wardrobe) -> None:
    async def run() -> None:
        async with showing_logs(running), client(running.url) as session:
            await load_all(session, wardrobe)
            assert await listed(session) == set(wardrobe.adapters)
            for name, path in wardrobe.adapters.items():
                status, model = await session.get(f"/v1/models/{name}")
                assert (status, model["parent"], model["root"]) == (200, "tiny", str(path))

    asyncio.run(run())
