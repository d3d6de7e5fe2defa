"""Any event in any order, with messages lost, repeated and late: nothing is lost or leaked."""

import random

import pytest

from common.modes import PauseMode
from tests.unit.scheduler.client import ModelRouter
from tests.unit.scheduler.model import VOCAB
from tests.unit.scheduler.real_router import RealRouter
from tests.unit.scheduler.world import World

SEEDS = 150
Router = type[ModelRouter] | type[RealRouter]


def next_prompt(world: World, chance: random.Random) -> list[int]:
    """Often the beginning of what was said before, cut anywhere, and something new behind it."""
    said: list[int] = []
    if world.router.clients and chance.random() < 0.6:
        before = chance.choice(world.router.clients[-8:])
        said = [*before.prompt, *before.output]
        said = said[: chance.choice([len(said), chance.randint(0, len(said))])][:40]
    new = chance.randint(0 if said else 1, 10 if said else 40)
    return said + [chance.randrange(VOCAB) for _ in range(new)]


def disturb(world: World, chance: random.Random) -> None:
    """One thing that can happen to a cluster."""
    names = list(world.nodes)
    name = chance.choice(names)
    node = world.nodes[name]
    match chance.randrange(17):
        case 0 | 1 | 2 | 3:
            prompt = next_prompt(world, chance)
            stop = (chance.randrange(VOCAB),) if chance.random() < 0.3 else ()
            world.router.submit(prompt, chance.choice([1, 1, 2, 8, 30]), stop)
        case 4:
            node.pause(chance.choice(list(PauseMode)))
        case 5 | 6:
            node.between_steps().continue_generation()
        case 7:
            live = [c for c in world.router.clients if c.end is None]
            if live:
                world.router.abort(chance.choice(live))
        case 8:
            node.between_steps().abort_requests()
        case 9:
            node.runner.fail_next = True
        case 10 if chance.random() < 0.3:
            world.kill(name)
            _ = world.add_prefill() if name.startswith("p") else world.add_decode()
        case 11 if chance.random() < 0.5:
            world.freeze(name, chance.choice([0.5, 3.0, 9.0]))
        case 12 if chance.random() < 0.5:
            world.break_router_link(name)
        case 13 if chance.random() < 0.4 and not node.scheduler.leave.under_way:
            node.between_steps().leave.begin(world.now)
            _ = world.add_prefill() if name.startswith("p") else world.add_decode()
        case 14 if chance.random() < 0.3:
            one, other = chance.choice(world.prefills()), chance.choice(world.decodes())
            world.cut(one, other, chance.choice([0.5, 3.0, 9.0]))
        case 15 if chance.random() < 0.3:
            node.between_steps().flush_cache()
        case _:
            pass


def run(
    seed: int, steps: int = 120, router: Router = ModelRouter, *, overlap: bool = False
) -> World:
    chance = random.Random(seed)
    world = World(
        seed,
        prefills=chance.randint(1, 2),
        decodes=chance.randint(1, 2),
        pages=chance.choice([20, 24, 40]),
        loss=chance.choice([0.0, 0.05, 0.3]),
        repeat=chance.choice([0.0, 0.2]),
        reorder=chance.random() < 0.5,
        local=chance.choice([0.0, 0.3, 1.0]),
        pieces=0.7 if seed % 3 == 0 else 0.0,
        prefix_cache=chance.random() < 0.8,
        router=router,
        overlap=overlap,
    )
    for _ in range(steps):
        if chance.random() < 0.5:
            disturb(world, chance)
        world.tick()
    world.settle()
    world.router.check()
    return world


@pytest.mark.parametrize("router", [ModelRouter, RealRouter])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_or_leaked(seed: int, router: Router) -> None:
    run(seed, router=router)


def test_the_fuzz_reaches_what_it_is_for() -> None:
    """A fuzz that never retracts, strays or loses a peer would prove nothing."""
    seen: dict[str, int] = {}
    replays = left = 0
    for seed in range(40):
        world = run(seed)
        replays += sum(client.replays for client in world.router.clients)
        left += len(world.left)
        for node in world.nodes.values():
            for name, count in node.scheduler.counters.items():
                seen[name] = seen.get(name, 0) + count
    assert replays > 50
    assert left > 20
    for name in (
        "retractions", "peers_lost", "failed_writes", "failed_steps", "stale_messages",
        "local_prefill_tokens",
        "cache_hit_tokens", "cache_evictions",
    ):  # fmt: skip
        assert seen.get(name, 0) > 5, (name, seen)
