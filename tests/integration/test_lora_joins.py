"""Nodes that see different files: all or nothing, and never two meanings of a name in one request.

Each node has a working directory of its own, and the adapter's path is relative to it.
"""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.faults.load import Load, Work
from tests.faults.matrix import PATIENT
from tests.integration.client import Client, client, eventually
from tests.integration.lora_rig import (
    Wardrobe,
    held_by,
    listed,
    load,
    mend,
    nobody_uses_any,
    try_load,
    unload,
)
from tests.integration.oracle import random_prompt
from tests.processes import ROOT, Fleet, Place, fleet, showing_logs

NAMES = ("prefill-0", "decode-0", "decode-1")
NAME, PATH = "dialect", "adapters/dialect"
PROMPT = random_prompt(random.Random(2), 40)

pytestmark = pytest.mark.timeout(300)
"""Starting a fleet takes a busy machine a minute, and counts for the first test."""


class Shelves:
    """What each node finds at the adapter's path."""

    def __init__(self, root: Path, wardrobe: Wardrobe) -> None:
        self._root = root
        self._adapters = list(wardrobe.adapters.values())
        for name in NAMES:
            self.folder(name).mkdir()

    def folder(self, node: str) -> Path:
        """That node's working directory."""
        return self._root / node

    def put(self, meaning: int | None, *nodes: str) -> None:
        """The wardrobe's adapter of that number, or nothing, for the nodes named or for all."""
        for node in nodes or NAMES:
            place = self.folder(node) / PATH
            shutil.rmtree(place, ignore_errors=True)
            if meaning is not None:
                shutil.copytree(self._adapters[meaning], place)


@pytest.fixture(scope="module")
def shelves(tmp_path_factory: pytest.TempPathFactory, wardrobe: Wardrobe) -> Shelves:
    return Shelves(tmp_path_factory.mktemp("shelves"), wardrobe)


@pytest.fixture(scope="module")
def running(wardrobe: Wardrobe, shelves: Shelves) -> Iterator[Fleet]:
    def place(name: str) -> Place:
        where = ("env", "--chdir", str(shelves.folder(name)))
        return Place(command=where, environment=(("PYTHONPATH", str(ROOT)),))

    with fleet(
        wardrobe.model,
        prefill=1,
        decode=2,
        node_flags={"num_pages": 100, "lease_s": 2, "longest_post_s": 0.5, "peer_timeout_s": 2},
        router_flags=PATIENT | {"heartbeat_s": 0.25, "node_timeout_s": 1.5},
        places={name: place(name) for name in NAMES},
    ) as made:
        yield made


@pytest.fixture(scope="module")
def works(wardrobe: Wardrobe, lora_works: list[Work]) -> list[Work]:
    """Half for the adapter, which is the wardrobe's first, and half for the base model."""
    first = next(iter(wardrobe.adapters))
    asked = [work.cut(50) for work in lora_works if work.adapter in (first, None)]
    return [Work(work.prompt, work.answer, work.adapter and NAME) for work in asked]


@asynccontextmanager
async def naked(running: Fleet) -> AsyncIterator[Client]:
    """A session with the fleet; what is loaded in the body is unloaded afterwards."""
    async with showing_logs(running), client(running.url) as session:
        await mend(running)
        for name in await listed(session):
            await unload(session, name)
        yield session
        await nobody_uses_any(session)
        for name in await listed(session):
            await unload(session, name)
        await nobody_has_any(session)


async def nobody_has_any(session: Client) -> None:
    async def empty() -> bool:
        return not any((await held_by(session)).values())

    async def explain() -> object:
        return await held_by(session)

    await eventually(empty, 10, explain)


async def all_right(running: Fleet, works: list[Work]) -> None:
    async with Load(running.urls, works) as asked:
        await asked.finish()
    assert [s.describe() for s in asked.streams if not s.is_right] == []


async def base_only(session: Client, wardrobe: Wardrobe) -> None:
    """The adapter is a 404 and the base model is served."""
    status, answer = await session.post("/generate", {"input_ids": PROMPT, "lora_path": NAME})
    assert status == 404, answer
    assert await session.tokens(PROMPT, 10) == wardrobe.answer(PROMPT, 10)


# ---------------------------------------------------------------- all or nothing


def test_one_node_does_not_find_it(running: Fleet, wardrobe: Wardrobe, shelves: Shelves) -> None:
    async def run() -> None:
        for lacking in NAMES:
            shelves.put(0)
            shelves.put(None, lacking)
            async with naked(running) as session:
                status, answer = await try_load(session, NAME, PATH)
                assert status == 400, answer
                assert lacking in answer["error_message"], answer
                await nobody_has_any(session)
                await base_only(session, wardrobe)
                shelves.put(0)
                await load(session, NAME, PATH)

    asyncio.run(run())


def test_one_node_finds_other_weights(running: Fleet, wardrobe: Wardrobe, shelves: Shelves) -> None:
    async def run() -> None:
        shelves.put(0)
        shelves.put(1, "decode-1")
        async with naked(running) as session:
            status, answer = await try_load(session, NAME, PATH)
            assert status == 400, answer
            assert NAME in answer["error_message"], answer
            await nobody_has_any(session)
            await base_only(session, wardrobe)

    asyncio.run(run())


def test_a_node_dies_while_it_loads(
    running: Fleet, wardrobe: Wardrobe, shelves: Shelves, works: list[Work]
) -> None:
    """It does not count: the load is done without it, and it gets the adapter when it is back."""

    async def run() -> None:
        shelves.put(0)
        async with naked(running) as session:
            loading = asyncio.create_task(try_load(session, NAME, PATH))
            running["decode-1"].kill()
            status, answer = await loading
            assert status == 200, answer
            await all_right(running, works)
            running["decode-1"].start()
            await running.ready()
            assert await held_by(session) == {name: {NAME} for name in NAMES}
            await all_right(running, works)

    asyncio.run(run())


# ---------------------------------------------------------------- joining


def test_a_node_that_joins_with_other_weights_serves_only_the_base_model(
    running: Fleet, wardrobe: Wardrobe, shelves: Shelves, works: list[Work]
) -> None:
    """Pairs agree on the weights; when only disagreeing nodes are left, it is an error."""

    async def run() -> None:
        shelves.put(0)
        async with naked(running) as session:
            await load(session, NAME, PATH)
            shelves.put(1, "decode-1")
            running["decode-1"].kill()
            running["decode-1"].start()
            await running.ready()
            held = await held_by(session)
            assert held == {"prefill-0": {NAME}, "decode-0": {NAME}, "decode-1": set()}
            await all_right(running, works * 2)
            running["decode-0"].kill()

            async def noticed() -> bool:
                return len(await session.nodes()) == len(NAMES) - 1

            await eventually(noticed, 10, session.nodes)
            body = {"input_ids": PROMPT, "lora_path": NAME, "timeout_s": 20}
            status, answer = await session.post("/generate", body)
            assert status in (404, 503), answer
            assert await session.tokens(PROMPT, 10) == wardrobe.answer(PROMPT, 10)
            running["decode-0"].start()
            await running.ready()
            await all_right(running, works)

    asyncio.run(run())


def test_a_router_that_comes_back_learns_from_the_nodes(
    running: Fleet, wardrobe: Wardrobe, shelves: Shelves, works: list[Work]
) -> None:
    async def run() -> None:
        shelves.put(0)
        async with naked(running) as session:
            await load(session, NAME, PATH)
            running["router-0"].kill()
            running["router-0"].start()
            await running.ready()
            assert await listed(session) == {NAME}
            await all_right(running, works)
            status, answer = await try_load(session, NAME, PATH)
            assert status == 400, answer
            assert "already loaded" in answer["error_message"]

    asyncio.run(run())
