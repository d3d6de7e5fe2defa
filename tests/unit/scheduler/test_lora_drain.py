"""Fairness between adapters: the rule as a table, then whole streams in virtual time."""

import random

import pytest

from common.lora.drain import Drain, closest_to_free, overdue
from tests.unit.scheduler.client import Client
from tests.unit.scheduler.harness import adapter, destination, generate, landed, prefill
from tests.unit.scheduler.node_settings import POST_S
from tests.unit.scheduler.test_lora_slots import arrive, decoding, named
from tests.unit.scheduler.world import TICK_S, World

NEVER_S = 1e9
DRAIN_WAIT_S = 2.0
LONGEST = 30
"""Tokens of the longest request of the stream; a token takes a tick."""
SLOWEST_LOAD_S = 0.6


@pytest.mark.parametrize(
    ("waits", "late"),
    [
        ({}, []),
        ({1: 9.0}, []),
        ({1: 8.0}, [1]),
        ({1: 7.0, 2: 3.0, 3: 9.5}, [2, 1]),
        ({2: 5.0, 1: 5.0}, [1, 2]),
    ],
)
def test_the_longest_waiting_comes_first_and_nobody_before_its_time(
    waits: dict[int, float], late: list[int]
) -> None:
    assert overdue(waits.items(), 10.0, 2.0) == late


@pytest.mark.parametrize(
    ("slots", "chosen"),
    [
        ([], None),
        ([(0, 7)], (0, 7)),
        ([(0, 7), (1, 3), (2, 5)], (1, 3)),
        ([(2, 3), (1, 3)], (1, 3)),
        ([(0, 7), (1, 0)], (1, 0)),
    ],
)
def test_the_slot_closest_to_being_free_is_drained(
    slots: list[tuple[int, int]], chosen: tuple[int, int] | None
) -> None:
    assert closest_to_free(slots) == chosen


@pytest.mark.parametrize(
    ("remaining", "longest_computing", "steps", "admitted"),
    [
        (10, 10, 0, True),
        (11, 10, 0, False),
        (5, 10, 5, True),
        (6, 10, 5, False),
        (1, 10, 10, False),
        (3, 2, 0, False),
        (1, 0, 0, False),
    ],
)
def test_a_draining_slot_takes_only_what_ends_within_what_was_there(
    remaining: int, longest_computing: int, steps: int, admitted: bool
) -> None:
    drain = Drain(waiter=2, horizon=10)
    for _ in range(steps):
        drain.on_step(1)
    assert drain.admits(remaining, longest_computing) is admitted


def stream(world: World, until_s: float, tokens: int = LONGEST) -> Client:
    """Adapter a in a steady stream, b in one request after a while; returns b's client."""
    a, b = world.adapters.load("a"), world.adapters.load("b")
    asked: Client | None = None
    while world.now < until_s and (asked is None or asked.end is None):
        if sum(c.end is None and c.adapter == a for c in world.router.clients) < 4:
            world.router.submit([1, 2, len(world.router.clients) % 90], tokens, (), a)
        if asked is None and world.now > 5.0:
            asked = world.router.submit([3, 4, 5], 3, (), b)
        world.tick()
    assert asked is not None
    return asked


def world_of_one_slot(drain_wait_s: float) -> World:
    return World(
        7,
        pages=120,
        max_loras_per_batch=1,
        max_loaded_loras=2,
        lora_drain_wait_s=drain_wait_s,
    )


def test_without_the_rule_a_steady_stream_starves_the_other_adapter() -> None:
    world = world_of_one_slot(NEVER_S)
    waiting = stream(world, until_s=60.0)
    assert waiting.end is None
    assert not waiting.output


def test_one_slot_is_emptied_within_the_longest_work_that_was_there() -> None:
    world = world_of_one_slot(DRAIN_WAIT_S)
    waiting = stream(world, until_s=60.0)
    assert waiting.end is not None
    assert len(waiting.output) == 3
    waited_s = world.now - waiting.accepted
    nodes = 2  # each empties its slot for it, one after the other, and fills it
    emptied_s = DRAIN_WAIT_S + LONGEST * TICK_S + POST_S + SLOWEST_LOAD_S
    assert waited_s < nodes * emptied_s + 2.0, waited_s
    drains = {n: node.scheduler.counters["lora_drains"] for n, node in world.nodes.items()}
    assert drains["d2"] >= 1
    world.settle()
    world.router.check()


@pytest.mark.parametrize("slots", [1, 2])
def test_every_adapter_of_many_in_steady_streams_gets_its_turn(slots: int) -> None:
    """The first of them with most of the load; in each turn another has its slot emptied."""
    chance = random.Random(slots)
    world = World(
        slots,
        pages=300,
        max_running_requests=8,
        max_loras_per_batch=slots,
        max_loaded_loras=2,
        lora_drain_wait_s=DRAIN_WAIT_S,
    )
    adapters = [world.adapters.load(f"adapter {n}") for n in range(4)]
    live: dict[str, list[Client]] = {adapter.name: [] for adapter in adapters}
    answered = dict.fromkeys(live, 0)
    longest_s = 0.0
    for _ in range(1200):
        for number, wanted in enumerate(adapters):
            clients = live[wanted.name]
            for client in clients:
                if not client.output:
                    longest_s = max(longest_s, world.now - client.accepted)
            answered[wanted.name] += sum(client.end is not None for client in clients)
            clients[:] = [client for client in clients if client.end is None]
            while len(clients) < (4 if number == 0 else 1):
                tokens = chance.choice([5, 20, LONGEST])
                clients.append(world.router.submit([1, chance.randrange(90)], tokens, (), wanted))
        world.tick()
    a_turn_s = DRAIN_WAIT_S + LONGEST * TICK_S + POST_S + SLOWEST_LOAD_S
    assert longest_s < len(adapters) * a_turn_s, longest_s
    assert min(answered.values()) > 5, answered
    world.settle()
    world.router.check()


def test_short_work_goes_on_beside_the_last_of_the_long() -> None:
    """What ends before the slot is free anyway costs the waiting one nothing."""
    node = prefill(num_pages=99, max_loras_per_batch=1, lora_drain_wait_s=1.0)
    node.serve("a", "b")

    def arrive(room: int, name: str, prompt: int) -> None:
        node.router(generate(room, prompt=prompt, adapter=adapter(name)))
        node.peer(destination(room, pages=-(-prompt // 4), name=name), "d")

    arrive(1, "a", 60)
    node.step()
    node.loader()
    node.step()
    arrive(2, "b", 4)
    node.step()
    node.now += 1.0
    node.step()
    assert node.scheduler.counters["lora_drains"] == 1
    arrive(3, "a", 50)
    arrive(4, "a", 8)
    node.step()
    queued = {req.room: req.queue.state.name for req in node.scheduler.unfinished()}
    assert queued == {1: "PREFILLING", 2: "WAITING", 3: "WAITING", 4: "PREFILLING"}
    for _ in range(12):
        node.step()
        node.loader()
    queued = {req.room: req.queue.state.name for req in node.scheduler.unfinished()}
    assert queued[2] == "INFLIGHT"
    assert queued[4] == "INFLIGHT"


def test_what_is_still_arriving_does_not_stretch_the_horizon() -> None:
    """Otherwise each that arrives would let in the next, and so on for ever."""
    node = decoding(1, "a", "b", lora_drain_wait_s=1.0)
    arrive(node, 1, "a", max_tokens=14)
    node.step()
    node.loader()
    node.fact(landed(1))
    node.step()
    arrive(node, 2, "b")
    node.step()
    node.now += 1.0
    node.step()
    assert node.scheduler.counters["lora_drains"] == 1
    arrive(node, 3, "a", max_tokens=8)
    node.step()
    assert named(node) == [1, 3], "it ends before the first does"
    for _ in range(4):
        node.step()
    arrive(node, 4, "a", max_tokens=8)
    node.step()
    assert named(node) == [1, 3], "it would not, though the third still has as much before it"
    node.fact(landed(3))
    for _ in range(8):
        node.step()
        node.loader()
    assert named(node) == [1, 3, 2], "now it is the other's turn"


def test_a_drain_ends_with_the_request_that_it_was_for() -> None:
    world = world_of_one_slot(0.0)
    a, b = world.adapters.load("a"), world.adapters.load("b")
    for _ in range(20):
        world.tick()
    world.router.submit([1, 2, 3], LONGEST, (), a)
    for _ in range(25):
        world.tick()
    waiting = world.router.submit([1, 2, 4], 3, (), b)
    for _ in range(3):
        world.tick()
    decode = world.nodes["d2"].scheduler
    assert decode.counters["lora_drains"] == 1
    world.router.abort(waiting)
    second = world.router.submit([1, 2, 5], LONGEST, (), a)
    for _ in range(6):
        world.tick()
    assert {req.rid: req.queue.state.name for req in decode.unfinished()}[second.rid] != "PREALLOC"
    world.settle()
    world.router.check()


def test_pinned_adapters_never_drain() -> None:
    world = World(7, pages=120, max_loras_per_batch=2, max_loaded_loras=3, lora_drain_wait_s=1.0)
    pinned = world.adapters.load("pinned", pinned=True)
    a, b = world.adapters.load("a"), world.adapters.load("b")
    for _ in range(20):
        world.tick()
    for n in range(300):
        for who in (pinned, a, b):
            if not any(c.adapter == who and c.end is None for c in world.router.clients):
                world.router.submit([n % 90, 1], 12, (), who)
        world.tick()
        for node in world.nodes.values():
            slots = node.scheduler._lora._placement.slots
            assert any(i.pinned for i in node.scheduler.adapters)
            assert slots.of(1) is not None, "the pinned one lost its slot"
            assert slots.of(1).drain is None  # type: ignore[union-attr]
    world.settle()
    world.router.check()
