"""sglang#27597: an adapter is unloaded in the very step in which its last request finishes.

There the finished request still counted as running, and validation killed the scheduler. Here who
uses an adapter is read off the queues, and a request leaves its queue in the step that ends it.
"""

from collections.abc import Callable
from typing import Any

from common.lifecycle import State
from common.messages import Adapter, UnloadAdapter
from common.scheduler import Scheduler
from tests.unit.scheduler.client import Client, ModelRouter
from tests.unit.scheduler.model import Violation
from tests.unit.scheduler.world import World

ROUNDS = 1000
BEHIND = 2
"""Requests of others that wait for admission on prefill all the time."""
SOON = 30
"""Ticks within which an unload is answered once nobody uses the adapter: a copy may be under way,
and a write must land."""


class Race:
    """A cluster in which adapter a is loaded, used and unloaded again and again, beside others."""

    def __init__(self) -> None:
        # Without a prefix cache: a prompt that was seen before would enter and end in one turn.
        self.world = World(
            11,
            pages=60,
            max_loras_per_batch=2,
            max_loaded_loras=2,
            chunk_size=4,
            prefix_cache=False,
        )
        for node in self.world.nodes.values():
            node.loader.slowest_s = 0.1
        self.b = self.world.adapters.load("b")
        self.others: list[Client] = []
        self.a: Adapter | None = None
        self.num_in_step = 0
        """Unloads that a node got in the turn whose step computed the last token there."""

    def tick(self) -> None:
        world = self.world
        self.others = [client for client in self.others if client.end is None]
        if len(self.others) < BEHIND:
            self.others.append(world.router.submit([1, 2, 3, 4, 5, 6], 3, (), self.b))
            self.others.append(world.router.submit([7, 8, 9, 10, 11, 12], 3))
        world.tick()
        assert isinstance(world.router, ModelRouter)
        world.router.clients = [c for c in world.router.clients if c.end is None]

    def until(self, done: Callable[[], bool], limit: int = 300) -> None:
        for _ in range(limit):
            if done():
                return
            self.tick()
        raise Violation(f"not done in time: {self.world.describe()}")

    def round(self, number: int) -> None:
        """Load, use, and unload on each node in the turn in which its last step will end it."""
        world = self.world
        self.a = world.adapters.load("a", content=f"content {number % 7}")
        self.until(lambda: len(world.adapters.serving(self.a)) == len(world.nodes))
        tokens = 1 + number % 3
        client = world.router.submit([1, 2, 3, 4, 5, 6, 7, number % 90], tokens, (), self.a)
        world.adapters.unload("a")
        world.adapters.wanted["a"].by_hand = True
        tickets: dict[str, int] = {}
        self.until(lambda: self._unload_where_it_ends(client, tickets, delay=number % 2))
        self.until(lambda: not any(t in world.adapters.asked for t in tickets.values()), SOON)
        client.check()
        assert client.replays == 0
        for name, node in world.nodes.items():
            assert all(info.name != "a" for info in node.scheduler.adapters), name
            assert "a" not in node.scheduler.stats().running_loras, name

    def _unload_where_it_ends(self, client: Client, tickets: dict[str, int], delay: int) -> bool:
        """One look before each tick; whether every node has been asked."""
        for name, node in self.world.nodes.items():
            ends = client.end is not None or self._ends_next(node.scheduler, delay)
            if name not in tickets and ends:
                self.num_in_step += client.end is None and delay == 0
                tickets[name] = self.world.adapters.ask(name, UnloadAdapter("a"))
        return len(tickets) == len(self.world.nodes)

    def _ends_next(self, scheduler: Scheduler[Any], delay: int) -> bool:
        """Whether the next step (`delay`: the one after it) computes the last token of a here."""
        for req in scheduler.unfinished():
            if req.adapter == self.a and req.queue.state in (State.RUNNING, State.PREFILLING):
                step = 1 if req.queue.state is State.RUNNING else scheduler.settings.chunk_size
                return bool(req.remaining <= step * (1 + delay))
        return False


def race(rounds: int) -> Race:
    game = Race()
    for number in range(rounds):
        game.round(number)
    game.world.settle()
    return game


def test_an_unload_in_the_step_that_ends_the_last_request_is_answered_a_thousand_times() -> None:
    game = race(ROUNDS)
    unloads = [done for _, verb, done in game.world.adapters.answers if verb == UnloadAdapter("a")]
    assert len(unloads) == ROUNDS * len(game.world.nodes)
    assert all(done.ok for done in unloads)
    assert game.num_in_step > ROUNDS / 2, game.num_in_step
    for node in game.world.nodes.values():
        assert node.scheduler.counters["internal_errors"] == 0
        assert node.scheduler.stats().loras_in_memory == 1
