"""Adapters loaded, unloaded, changed, evicted and pinned in any order beside every other fault.

The modelled KV and tokens depend on the adapter's digest, so whatever is computed with a wrong one,
on either node, changes a text.
"""

import random

import pytest

from common.messages import LoadAdapter, UnloadAdapter
from tests.unit.scheduler.client import ModelRouter
from tests.unit.scheduler.model import VOCAB
from tests.unit.scheduler.real_router import RealRouter
from tests.unit.scheduler.test_fuzz import Router, disturb, next_prompt
from tests.unit.scheduler.world import World

SEEDS = 100
NAMES = ("a", "b", "c", "d", "e")


def submit(world: World, chance: random.Random) -> None:
    prompt = next_prompt(world, chance)
    stop = (chance.randrange(VOCAB),) if chance.random() < 0.3 else ()
    wanted = [w.adapter for w in world.adapters.wanted.values() if not w.going]
    known = [adapter for adapter in wanted if world.router.knows(adapter)]
    adapter = chance.choice([None, *known, *known])
    world.router.submit(prompt, chance.choice([1, 1, 2, 8, 30]), stop, adapter)


def disturb_adapters(world: World, chance: random.Random) -> None:
    """One thing that can happen to adapters."""
    adapters = world.adapters
    name = chance.choice(NAMES)
    node = world.nodes[chance.choice(list(world.nodes))]
    match chance.randrange(12):
        case 0 | 1 | 2 | 3 | 4:
            submit(world, chance)
        case 5 | 6 if name not in adapters.wanted:
            content = f"{name}-{chance.randrange(3)}"
            pins = sum(wanted.pinned for wanted in adapters.wanted.values())
            may_pin = pins < node.scheduler.settings.max_loras_per_batch - 1
            adapters.load(name, pinned=may_pin and chance.random() < 0.3, content=content)
        case 7 if name in adapters.wanted:
            adapters.unload(name, rude=chance.random() < 0.3)
        case 8 if name in adapters.wanted and chance.random() < 0.5:
            world.disk.away.add(adapters.wanted[name].path)
        case 9 if name in adapters.wanted and chance.random() < 0.5:
            world.disk.changed[adapters.wanted[name].path] = "something else"
        case 10:
            node.loader.fail_next_place = chance.random() < 0.5
            world.disk.heal()
        case 11:
            who = chance.choice(list(world.nodes))
            verb = UnloadAdapter(name)
            if chance.random() < 0.5 and name in adapters.wanted:
                adapters.ask(who, verb)
            elif name in adapters.wanted:
                adapters.ask(who, LoadAdapter(name=name, path=adapters.wanted[name].path))
        case _:
            pass


def run(
    seed: int, steps: int = 150, router: Router = ModelRouter, *, overlap: bool = False
) -> World:
    chance = random.Random(seed)
    slots = chance.randint(1, 3)
    world = World(
        seed,
        prefills=chance.randint(1, 2),
        decodes=chance.randint(1, 2),
        pages=chance.choice([20, 24, 40]),
        loss=chance.choice([0.0, 0.05, 0.3]),
        repeat=chance.choice([0.0, 0.2]),
        reorder=chance.random() < 0.5,
        local=chance.choice([0.0, 0.3, 1.0]),
        max_loras_per_batch=slots,
        max_loaded_loras=slots + chance.randint(0, 2),
        lora_drain_wait_s=chance.choice([0.0, 1.0, 3.0]),
        router=router,
        overlap=overlap,
    )
    for _ in range(steps):
        if chance.random() < 0.25:
            disturb(world, chance)
        elif chance.random() < 0.4:
            disturb_adapters(world, chance)
        world.tick()
    world.settle()
    world.router.check()
    return world


@pytest.mark.parametrize("router", [ModelRouter, RealRouter])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_text_is_computed_with_another_adapter_and_none_is_lost(
    seed: int, router: Router
) -> None:
    run(seed, router=router)


@pytest.mark.parametrize("router", [ModelRouter, RealRouter])
def test_the_fuzz_reaches_what_it_is_for(router: Router) -> None:
    seen: dict[str, int] = {}
    answered = with_adapter = 0
    for seed in range(20):
        world = run(seed, router=router)
        answered += len(world.adapters.answers)
        with_adapter += sum(c.adapter is not None and bool(c.output) for c in world.router.clients)
        for node in world.nodes.values():
            for name, count in node.scheduler.counters.items():
                seen[name] = seen.get(name, 0) + count
    assert answered > 150
    assert with_adapter > 150
    for name in (
        "lora_reads", "lora_read_failures", "lora_placements", "lora_placement_failures",
        "lora_evictions", "lora_slot_changes", "lora_drains",
    ):  # fmt: skip
        assert seen.get(name, 0) > 5, (name, seen)
    assert "unexpected_adapter_events" not in seen
