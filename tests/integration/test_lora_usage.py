"""Who uses an adapter: nobody any more once its requests have ended, however they ended.

sglang#29179 and #29565 leaked a count for each request that was aborted in some state, so that an
unload never returned; #27597 counted finished requests as running, and the scheduler died.
"""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.load import Load, Work
from tests.faults.matrix import PATIENT
from tests.integration.client import Client, Refused, client, eventually
from tests.integration.lora_rig import (
    PROMPT_S,
    Wardrobe,
    abort_all,
    crowded_fleet,
    go_on,
    held_by,
    in_use,
    listed,
    load,
    load_all,
    mend,
    nobody_uses_any,
    pause,
    try_unload,
    unload_promptly,
)
from tests.integration.oracle import random_prompt
from tests.processes import Fleet, showing_logs

NODE_FLAGS = {"num_pages": 40, "chunk_size": 32, "max_loras_per_batch": 2}
"""Pools for about four requests and slots for two of three adapters: some of everything waits."""
ROUTER_FLAGS = PATIENT | {"heartbeat_s": 0.25, "node_timeout_s": 1.5}
STATES = [  # prefill's `waiting` and `inflight` are over before a look at them is
    ("prefill", "bootstrap"),
    ("prefill", "prefilling"),
    ("decode", "prealloc"),
    ("decode", "transfer"),
    ("decode", "running"),
]
CATCH_S = 60.0
"""A moment at which some of everything waits comes sooner, however busy the machine is."""
pytestmark = pytest.mark.timeout(300)
"""Starting a fleet takes a busy machine a minute, and counts for the first test."""


@pytest.fixture(scope="module")
def running(wardrobe: Wardrobe) -> Iterator[Fleet]:
    with crowded_fleet(wardrobe, NODE_FLAGS, ROUTER_FLAGS) as made:
        yield made


@asynccontextmanager
async def dressed(running: Fleet, wardrobe: Wardrobe) -> AsyncIterator[Client]:
    """A session with the fleet, all adapters loaded; nothing may be left when the body is done."""
    async with showing_logs(running), client(running.url) as session:
        await mend(running)
        await load_all(session, wardrobe)
        yield session
        await nobody_uses_any(session)
        await session.wait_idle()


async def serves_right(session: Client, lora_works: list[Work]) -> None:
    """One request after the other, for every adapter that is loaded and the base model."""
    known = await listed(session)
    tried: set[str | None] = set()
    for work in lora_works:
        if work.adapter not in tried and work.adapter in {None, *known}:
            tried.add(work.adapter)
            assert await session.tokens(work.prompt, 20, work.adapter) == work.answer[:20]
    assert tried == {None, *known}


# ---------------------------------------------------------------- aborts and clients that leave


@pytest.mark.parametrize("how", ["abort", "leave"])
@pytest.mark.parametrize(("role", "queue"), STATES, ids=str)
def test_ended_in_every_state_while_nothing_computes(
    role: str, queue: str, how: str, running: Fleet, wardrobe: Wardrobe, lora_works: list[Work]
) -> None:
    async def run() -> None:
        async with dressed(running, wardrobe) as session:
            async with load_caught(session, running, lora_works, role, queue) as load:
                if how == "abort":
                    await abort_all(session)
                else:
                    for number in range(len(lora_works)):
                        load.leave(number)
                await load.finish()
                assert all(stream.is_prefix for stream in load.streams)
                await nobody_uses_any(session)
                for name in wardrobe.adapters:
                    await unload_promptly(session, name)
                await go_on(session)
            assert await held_by(session) == {node.name: set() for node in running.nodes}
            await load_all(session, wardrobe)
            await serves_right(session, lora_works)

    asyncio.run(run())


@asynccontextmanager
async def load_caught(
    session: Client, running: Fleet, works: list[Work], role: str, queue: str
) -> AsyncIterator[Load]:
    """A load under which all forward passes have stopped at a moment at which nodes of a role have
    requests in a queue, adapters are in use and other requests still wait at the router. A load
    that is over before such a moment was caught gives way to a new one."""

    async def seen() -> bool:
        infos = [await session.node_info(n) for n in await session.nodes() if n["role"] == role]
        return any(info["stats"].get("queues", {}).get(queue, 0) for info in infos)

    async def caught(load: Load) -> bool:
        some_wait = load.unfinished > await requests_at_nodes(session)
        return some_wait and await seen() and await in_use(session) != {}

    deadline = time.monotonic() + CATCH_S
    while time.monotonic() < deadline:
        async with Load(running.urls, works) as load:
            while load.unfinished:
                if not await seen():
                    await asyncio.sleep(0.01)
                    continue
                await pause(session)
                if await caught(load):
                    yield load
                    return
                await go_on(session)
    raise AssertionError(f"nobody was ever seen to stay {queue}")


async def requests_at_nodes(session: Client) -> int:
    """On decode nodes, since each request that left the router is at one."""
    infos = [await session.node_info(n) for n in await session.nodes() if n["role"] == "decode"]
    return sum(sum(info["stats"].get("queues", {}).values()) for info in infos)


@pytest.mark.parametrize("seed", range(2))
def test_ended_at_random_moments(
    seed: int, running: Fleet, wardrobe: Wardrobe, lora_works: list[Work]
) -> None:
    """Clients leave or abort one by one while all else goes on; and one unload waits for them."""

    async def run() -> None:
        chance = random.Random(seed)
        async with dressed(running, wardrobe) as session, Load(running.urls, lora_works) as load:
            for number in chance.sample(range(len(lora_works)), len(lora_works)):
                await asyncio.sleep(chance.uniform(0, 0.05))
                if chance.random() < 0.5:
                    load.leave(number)
                else:
                    body = {"rid": load.streams[number].rid}
                    status, answer = await session.post("/abort_request", body)
                    assert status == 200, answer
            ended = time.monotonic()
            await asyncio.gather(*(unload_promptly(session, name) for name in wardrobe.adapters))
            assert time.monotonic() - ended < PROMPT_S
            await load.finish()
            assert [s.describe() for s in load.streams if not s.is_prefix] == []

    asyncio.run(run())


def test_four_choices_each(running: Fleet, wardrobe: Wardrobe, lora_works: list[Work]) -> None:
    """`n=4` in all ways: whole, aborted, and left alone."""

    async def ask(session: Client, number: int, work: Work) -> list[list[int]]:
        sampling = {
            "temperature": 0,
            "max_new_tokens": len(work.answer),
            "ignore_eos": True,
            "n": 4,
        }
        body = {"input_ids": work.prompt, "sampling_params": sampling, "rid": f"four-{number}"}
        whole = body | ({} if work.adapter is None else {"lora_path": work.adapter})
        status, answer = await session.post("/generate", whole)
        assert status == 200, answer
        return [choice["output_ids"] for choice in answer]

    async def run() -> None:
        async with dressed(running, wardrobe) as session:
            asking = [
                asyncio.create_task(ask(session, number, work))
                for number, work in enumerate(lora_works[:12])
            ]
            await eventually(lambda: everything_is_busy(session), 20)
            for number in range(0, 12, 3):
                await session.post("/abort_request", {"rid": f"four-{number}"})
                asking[number + 1].cancel()
            answers = await asyncio.gather(*asking, return_exceptions=True)
            for number in range(2, 12, 3):
                assert answers[number] == [lora_works[number].answer] * 4
            for name in wardrobe.adapters:
                await unload_promptly(session, name)

    asyncio.run(run())


async def everything_is_busy(session: Client) -> bool:
    """Some adapter's request has begun to generate."""
    infos = [await session.node_info(node) for node in await session.nodes()]
    return any(i["stats"].get("running") and i["stats"].get("running_loras") for i in infos)


# ---------------------------------------------------------------- refused, too late, in the way


def test_prompts_that_are_too_long(
    running: Fleet, wardrobe: Wardrobe, lora_works: list[Work]
) -> None:
    async def run() -> None:
        prompt = random_prompt(random.Random(400), 500)
        async with dressed(running, wardrobe) as session:
            for name in wardrobe.adapters:
                sampling = {"max_new_tokens": 200}
                body = {"input_ids": prompt, "lora_path": name, "sampling_params": sampling}
                status, answer = await session.post("/generate", body)
                assert status == 400, answer
                assert await in_use(session) == {}
                await unload_promptly(session, name)

    asyncio.run(run())


def test_time_outs(running: Fleet, wardrobe: Wardrobe, lora_works: list[Work]) -> None:
    async def ask(session: Client, work: Work) -> int:
        sampling = {"temperature": 0, "max_new_tokens": len(work.answer), "ignore_eos": True}
        body = {"input_ids": work.prompt, "sampling_params": sampling, "timeout_s": 0.2}
        body |= {} if work.adapter is None else {"lora_path": work.adapter}
        status, _ = await session.post("/generate", body)
        return status

    async def run() -> None:
        async with dressed(running, wardrobe) as session:
            statuses = await asyncio.gather(*(ask(session, work) for work in lora_works))
            assert set(statuses) <= {200, 504}
            assert 504 in statuses
            for name in wardrobe.adapters:
                await unload_promptly(session, name)

    asyncio.run(run())


def test_unload_waits_for_whoever_runs_and_refuses_others_at_once(
    running: Fleet, wardrobe: Wardrobe, lora_works: list[Work]
) -> None:
    name = next(iter(wardrobe.adapters))
    own = [work for work in lora_works if work.adapter == name]

    async def run() -> None:
        async with dressed(running, wardrobe) as session:
            async with Load(running.urls, own) as load:
                await eventually(lambda: everything_is_busy(session), 20)
                await pause(session)
                unloading = asyncio.create_task(try_unload(session, name))
                await eventually(lambda: is_not_found(session, own[0]), PROMPT_S)
                assert name not in await listed(session)
                assert load.unfinished
                assert not unloading.done()
                await go_on(session)
                status, answer = await unloading
                assert status == 200, answer
                assert await in_use(session) == {}
                await load.finish()
            assert [s.describe() for s in load.streams if not s.is_right] == []

    asyncio.run(run())


async def is_not_found(session: Client, work: Work) -> bool:
    body = {"input_ids": work.prompt, "lora_path": work.adapter, "timeout_s": 0.2}
    status, answer = await session.post("/generate", body)
    assert status in (404, 504), answer
    return status == 404


# ---------------------------------------------------------------- nodes that die


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_node_dies_and_what_it_ran_ends_elsewhere(
    role: str, running: Fleet, wardrobe: Wardrobe, lora_works: list[Work]
) -> None:
    """The unload comes while the node is away; when it is back it has what is loaded, no more."""
    gone, *kept = wardrobe.adapters

    async def run() -> None:
        victim = running[f"{role}-1"]
        async with dressed(running, wardrobe) as session:
            async with Load(running.urls, lora_works) as load:
                await eventually(lambda: everything_is_busy(session), 20)
                victim.kill()
                await load.finish()
            assert [s.describe() for s in load.streams if not s.is_right] == []
            await unload_promptly(session, gone)
            victim.start()
            await running.ready()
            assert (await held_by(session))[victim.name] == set(kept)
            await serves_right(session, lora_works)

    asyncio.run(run())


def test_a_node_that_slept_through_an_unload_is_told(
    running: Fleet, wardrobe: Wardrobe, lora_works: list[Work]
) -> None:
    """It wakes up with the adapter; that must not make the adapter rise again."""
    gone, *kept = wardrobe.adapters

    async def run() -> None:
        sleeper = running["decode-1"]
        async with dressed(running, wardrobe) as session:
            sleeper.signal(signal.SIGSTOP)
            try:
                await unload_promptly(session, gone)
            finally:
                sleeper.signal(signal.SIGCONT)
            await running.ready()

            async def told() -> bool:
                return (await held_by(session))[sleeper.name] == set(kept)

            await eventually(told, 30)
            assert gone not in await listed(session)
            await load(session, gone, wardrobe.adapters[gone])
            await serves_right(session, lora_works)

    asyncio.run(run())


# ---------------------------------------------------------------- finished and unloaded at once


def test_streams_finish_while_their_adapter_comes_and_goes(
    running: Fleet, wardrobe: Wardrobe, lora_works: list[Work]
) -> None:
    """sglang#27597 with processes: short requests end in the very steps of unloads and loads,
    while long prompts of the base model keep prefill's admission busy."""
    name = next(iter(wardrobe.adapters))
    short = [work for work in lora_works if work.adapter == name]
    base = [work for work in lora_works if work.adapter is None]

    async def run() -> None:
        stop = asyncio.Event()
        async with dressed(running, wardrobe) as session:

            async def client_of_it(chance: random.Random) -> tuple[int, int]:
                right = refused = 0
                while not stop.is_set():
                    work, count = chance.choice(short), chance.randint(1, 6)
                    try:
                        answer = await session.stream(work.prompt, count, adapter=name)
                    except Refused as error:
                        if error.status != 404:
                            raise
                        refused += 1
                        await asyncio.sleep(0.01)
                    else:
                        assert answer == work.answer[:count]
                        right += 1
                return right, refused

            async def client_of_the_base(work: Work) -> None:
                while not stop.is_set():
                    assert await session.tokens(work.prompt, 3) == work.answer[:3]

            async with asyncio.TaskGroup() as tasks:
                counting = [tasks.create_task(client_of_it(random.Random(i))) for i in range(8)]
                for work in base[:4]:
                    tasks.create_task(client_of_the_base(work))
                try:
                    for _ in range(40):
                        await asyncio.sleep(0.05)
                        await unload_promptly(session, name)
                        await load(session, name, wardrobe.adapters[name])
                finally:
                    stop.set()
            right, refused = map(sum, zip(*(task.result() for task in counting), strict=True))
            assert right > 40
            assert refused > 0
            assert all(member.is_alive for member in running.members.values())

    asyncio.run(run())
