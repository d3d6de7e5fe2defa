"""One node of the virtual cluster: a real scheduler, and stand-ins for everything around it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.events import FromRouter, RouterLost
from common.kv_cache.hashing import key
from common.messages import Incarnation, LoadAdapter, UnloadAdapter
from common.modes import PauseMode
from common.plan import CacheChanged
from common.scheduler import Scheduler
from common.steps import Runner, Steps
from tests.unit.scheduler.compiler import FakeCompiler
from tests.unit.scheduler.loader import FakeLoader
from tests.unit.scheduler.model import FakeRunner, Memory, Planted, Violation
from transfer.pieces import PieceGatherer


class WatchedSteps(Steps):
    """Remembers what went wrong."""

    def __init__(self, scheduler: Scheduler[Any], runner: Runner, clock: Callable[[], float]):
        super().__init__(scheduler, runner, clock)
        self.errors: list[Exception] = []

    def _report(self, error: Exception, num_rows: int) -> None:
        self.errors.append(error)


@dataclass
class Node:
    scheduler: Scheduler[Any]
    memory: Memory
    runner: FakeRunner
    loader: FakeLoader
    compiler: FakeCompiler
    steps: WatchedSteps
    inbox: deque[FromRouter | RouterLost] = field(default_factory=deque)
    facts: list[Any] = field(default_factory=list)
    frozen_until: float = 0.0
    awaits_step_until: float | None = None
    """Its engine thread waits for the device; its other threads do not."""
    leases: dict[Incarnation, float] = field(default_factory=dict)
    peers: set[Incarnation] = field(default_factory=set)
    """Prefill: what the transfer backend knows."""
    verbs: deque[tuple[int, LoadAdapter | UnloadAdapter]] = field(default_factory=deque)
    """Of adapters, and their tickets."""

    gatherer: PieceGatherer = field(default_factory=PieceGatherer)
    """Decode: puts the notifications of writes in pieces together."""
    told: set[int] = field(default_factory=set)
    """Keys of cached pages, as a router would know them."""

    @property
    def takes_work(self) -> bool:
        return self.scheduler.paused is None and not self.scheduler.leave.under_way

    def between_steps(self) -> Scheduler[Any]:
        """For what the event loop does only when nothing is in flight."""
        self.awaits_step_until = None
        self.steps.land()
        self._check_steps()
        return self.scheduler

    def take_in(self) -> None:
        self.steps.take_in()
        self._check_steps()

    def _check_steps(self) -> None:
        """What fails in a step is a fault of the design, unless it was planted."""
        for error in self.steps.errors:
            if not isinstance(error, Planted):
                raise error

    def pause(self, mode: PauseMode) -> None:
        """Where nothing computed before may survive, nothing does: its weights are swapped. What a
        posted write still reads is not touched by that."""
        self.between_steps().pause_generation(mode)
        if self.runner.in_flight:
            raise Violation("a paused node computes")
        if mode.empties_node:
            held = {page for req in self.scheduler._reqs.values() for page in req.pages}
            self.memory.wipe(set(range(self.memory.num_pages)) - held)

    def check(self) -> None:
        """Between two turns."""
        self.scheduler.check_invariants()
        held = self.scheduler.kv._pool._held
        if not all(held[page] for page in self.runner.pages_to_be_written()):
            raise Violation("a step in flight writes into a page that nobody has")

    def hear(self, change: CacheChanged) -> None:
        """What routers are told must make sense: nothing is stored or evicted twice."""
        if change.cleared:
            self.told.clear()
        if not self.told.issuperset(change.evicted):
            raise Violation("a page is evicted that was not stored")
        self.told.difference_update(change.evicted)
        if not self.told.isdisjoint(change.stored):
            raise Violation("a page is stored twice")
        self.told.update(change.stored)

    def check_told(self) -> None:
        """After a plan's messages: routers know exactly what is cached."""
        entries = self.scheduler.kv._cache._entries
        if self.told != {key(page_hash) for page_hash in entries}:
            raise Violation("routers believe something else to be cached")
