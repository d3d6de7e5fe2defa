"""Nodes get only what they can soon run: it keeps their queues short and costs no throughput.

The same work runs twice in the virtual cluster, with the router's bounds scaled to its small nodes
and without bounds. A message between processes takes a whole step there, far longer than in life.
"""

import random
from dataclasses import dataclass

import pytest

from router import load, requests
from tests.unit.scheduler import fabric
from tests.unit.scheduler import world as virtual
from tests.unit.scheduler.model import PAGE
from tests.unit.scheduler.real_router import RealRouter
from tests.unit.scheduler.world import World

CHUNK, RUNNING, REQUESTS = 32, 8, 120
UNBOUNDED = 10**9


@dataclass(frozen=True)
class Work:
    prompt: tuple[int, int] = (6, 20)
    output: tuple[int, int] = (5, 25)
    pages: int = 400


@dataclass(frozen=True)
class Run:
    ticks: int
    peak: int
    """Most requests on one node."""


def run(work: Work, seed: int) -> Run:
    world = World(
        seed,
        pages=work.pages,
        router=RealRouter,
        max_running_requests=RUNNING,
        chunk_size=CHUNK,
    )
    dice = random.Random(seed)
    for _ in range(REQUESTS):
        prompt = [dice.randrange(5, 30) for _ in range(dice.randint(*work.prompt))]
        world.router.submit(prompt, dice.randint(*work.output))
    ticks = peak = 0
    while not world.router.all_ended():
        world.tick()
        ticks += 1
        peak = max(peak, *(len(node.scheduler.unfinished()) for node in world.nodes.values()))
    world.router.check()
    return Run(ticks, peak)


@pytest.mark.parametrize(
    ("work", "allowed"),
    [
        pytest.param(Work(), 1.02, id="slots are scarce"),
        pytest.param(Work(output=(20, 20)), 1.03, id="requests end together"),
        pytest.param(Work(pages=60), 1.03, id="pages are scarce"),
        pytest.param(Work(prompt=(60, 120)), 1.04, id="prefill is scarce"),
    ],
)
def test_short_queues_cost_no_throughput(
    monkeypatch: pytest.MonkeyPatch, work: Work, allowed: float
) -> None:
    monkeypatch.setattr(fabric, "POST_S", 2 * virtual.TICK_S)
    monkeypatch.setattr(requests, "HEADROOM_TOKENS", 2 * PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(load, "LOOK_AHEAD_TOKENS", UNBOUNDED)
        patch.setattr(load, "decode_slots", lambda _: UNBOUNDED)
        patch.setattr(load, "has_pages", lambda _: True)
        free = [run(work, seed) for seed in (1, 2)]
    monkeypatch.setattr(load, "LOOK_AHEAD_TOKENS", 2 * CHUNK)
    bounded = [run(work, seed) for seed in (1, 2)]
    assert all(one.peak == REQUESTS for one in free)
    assert all(one.peak <= 2 * RUNNING + 2 for one in bounded)
    ratio = sum(one.ticks for one in bounded) / sum(one.ticks for one in free)
    assert ratio <= allowed
