"""Loading and unloading on a live cluster: words for what cannot be, and memory that is full."""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import AdapterSpec, make_adapter
from tests.faults.load import Load, Work
from tests.faults.matrix import PATIENT
from tests.integration.client import Client, client
from tests.integration.lora_rig import (
    Wardrobe,
    held_by,
    listed,
    load,
    load_all,
    mend,
    nobody_uses_any,
    try_load,
    try_unload,
    unload,
)
from tests.integration.oracle import random_prompt
from tests.processes import Fleet, fleet, showing_logs
from tests.tiny_models import make_tiny_model

SLOTS = 2
NODE_FLAGS = {"num_pages": 200, "max_loras_per_batch": SLOTS, "max_loaded_loras": SLOTS}
"""Host memory for two adapters: with a third one, somebody has to be read again."""
PROMPT = random_prompt(random.Random(1), 30)

pytestmark = pytest.mark.timeout(300)
"""Starting a fleet takes a busy machine a minute, and counts for the first test."""


@pytest.fixture(scope="module")
def running(wardrobe: Wardrobe) -> Iterator[Fleet]:
    with fleet(
        wardrobe.model, prefill=1, decode=1, node_flags=NODE_FLAGS, router_flags=PATIENT
    ) as made:
        yield made


@asynccontextmanager
async def naked(running: Fleet) -> AsyncIterator[Client]:
    """A session with the fleet; whatever is loaded in the body is unloaded afterwards."""
    async with showing_logs(running), client(running.url) as session:
        await mend(running)
        for name in await listed(session):
            await unload(session, name)
        yield session
        await nobody_uses_any(session)
        for name in await listed(session):
            await unload(session, name)
        assert await held_by(session) == {node.name: set() for node in running.nodes}
        await session.wait_idle()


async def refused(session: Client, name: str, path: object, *words: str, **more: Any) -> None:
    """The load is a 400 that says all of `words`; the cluster holds what it held before."""
    before = await held_by(session)
    status, answer = await try_load(session, name, path, **more)
    assert status == 400, answer
    assert answer["success"] is False
    for word in (name, *words):
        assert word in answer["error_message"], answer
        assert word in answer["error"]["message"]
    assert await held_by(session) == before


async def answers(session: Client, wardrobe: Wardrobe, name: str) -> bool:
    return await session.tokens(PROMPT, 20, name) == wardrobe.answer(PROMPT, 20, name)


# ---------------------------------------------------------------- words


def test_loaded_twice_and_unloaded_twice(running: Fleet, wardrobe: Wardrobe) -> None:
    name, path = next(iter(wardrobe.adapters.items()))

    async def run() -> None:
        async with naked(running) as session:
            status, answer = await try_unload(session, name)
            assert status == 404
            assert "was never loaded" in answer["error_message"]
            loaded = await load(session, name, path)
            assert loaded["loaded_adapters"] == {name: str(path)}
            assert bytes.fromhex(loaded["digest"])
            await refused(session, name, path, "already loaded")
            assert await answers(session, wardrobe, name)
            await unload(session, name)
            status, answer = await try_unload(session, name)
            assert status == 404
            assert "was never loaded" in answer["error_message"]
            status, answer = await session.post(
                "/generate", {"input_ids": PROMPT, "lora_path": name}
            )
            assert (status, answer["error"]["code"]) == (404, "model_not_found")

    asyncio.run(run())


def test_a_name_may_mean_something_else_after_an_unload(running: Fleet, wardrobe: Wardrobe) -> None:
    async def run() -> None:
        async with naked(running) as session:
            digests = set()
            for meaning, path in wardrobe.adapters.items():
                digests.add((await load(session, "chameleon", path))["digest"])
                wanted = wardrobe.answer(PROMPT, 20, meaning)
                assert await session.tokens(PROMPT, 20, "chameleon") == wanted
                await unload(session, "chameleon")
            assert len(digests) == len(wardrobe.adapters)

    asyncio.run(run())


def test_pins_that_would_starve_the_others(running: Fleet, wardrobe: Wardrobe) -> None:
    (first, path), (second, other), (third, last) = wardrobe.adapters.items()

    async def run() -> None:
        async with naked(running) as session:
            await load(session, first, path, pinned=True)
            await refused(session, second, other, "would starve", pinned=True)
            await load(session, second, other)
            await load(session, third, last)
            for name in (second, third, first, second):
                assert await answers(session, wardrobe, name)
            await unload(session, first)
            await unload(session, second)
            await load(session, second, other, pinned=True)

    asyncio.run(run())


def test_what_does_not_fit_is_refused_by_name(
    running: Fleet, wardrobe: Wardrobe, tmp_path: Path
) -> None:
    larger = make_tiny_model("llama", tmp_path / "larger", hidden_size=96)
    deeper = make_tiny_model("llama", tmp_path / "deeper", num_hidden_layers=5)
    dora = AdapterSpec(more={"use_dora": True})
    wrong = {
        "shape": (make_adapter(larger, tmp_path / "shape"), "shape"),
        "layers": (make_adapter(deeper, tmp_path / "layers"), "layer"),
        "dora": (make_adapter(wardrobe.model, tmp_path / "dora", dora), "use_dora"),
    }

    async def run() -> None:
        async with naked(running) as session:
            for name, (path, word) in wrong.items():
                await refused(session, name, path, "incompatible", word)
            await refused(session, "nothing", tmp_path / "no-such-folder", "no-such-folder")
            await refused(session, "model", wardrobe.model, "adapter_config.json")
            assert await listed(session) == set()

    asyncio.run(run())


# ---------------------------------------------------------------- memory


def test_more_adapters_than_fit_are_read_again(
    running: Fleet, wardrobe: Wardrobe, lora_works: list[Work]
) -> None:
    """Three adapters, memory and slots for two: all are served, one by one and all at once."""
    works = [work.cut(40) for work in lora_works]

    async def run() -> None:
        async with naked(running) as session:
            await load_all(session, wardrobe)
            reads = await session.counter("lora_reads")
            for name in [*wardrobe.adapters] * 2:
                assert await answers(session, wardrobe, name)
            assert await session.counter("lora_reads") > reads
            assert await session.counter("lora_evictions") > 0
            async with Load(running.urls, works) as load_:
                await load_.finish()
            assert [s.describe() for s in load_.streams if not s.is_right] == []
            for node in await session.nodes():
                stats = (await session.node_info(node))["stats"]
                assert stats["loras_in_memory"] <= SLOTS
                assert stats["lora_slots"] == SLOTS

    asyncio.run(run())


@pytest.mark.parametrize("fate", ["vanished", "changed"])
def test_files_that_are_gone_when_they_are_wanted_again(
    fate: str, running: Fleet, wardrobe: Wardrobe, tmp_path: Path
) -> None:
    """Only requests for that adapter fail; they never get other weights' answers; when the files
    are back it is served again; and an unload needs no files."""
    (first, path), *others = wardrobe.adapters.items()
    folder, aside = tmp_path / first, tmp_path / "aside"
    shutil.copytree(path, folder)

    async def ask(session: Client) -> tuple[int, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
        body = {"input_ids": PROMPT, "lora_path": first, "sampling_params": sampling}
        return await session.post("/generate", body | {"timeout_s": 30})

    async def run() -> None:
        async with naked(running) as session:
            await load(session, first, folder)
            for name, other in others:
                await load(session, name, other)
                assert await answers(session, wardrobe, name)  # and `first` is out of memory
            folder.rename(aside)
            if fate == "changed":
                shutil.copytree(others[0][1], folder)
            status, answer = await ask(session)
            assert status in (404, 503), answer
            assert first in answer["error"]["message"], answer
            await nobody_uses_any(session)
            for name, _ in others:
                assert await answers(session, wardrobe, name)
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
            assert await answers(session, wardrobe, first)
            for name, _ in others:
                assert await answers(session, wardrobe, name)
            shutil.rmtree(folder)
            await unload(session, first)

    asyncio.run(run())
