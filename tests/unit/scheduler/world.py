"""A whole cluster in virtual time: real schedulers, a lossy side channel, writes that take a while.

The wire between decode and prefill is `network`. The router link is ordered and
breaks as a whole, as `common/node_io` guarantees. Nodes can be killed, replaced, frozen and paused.
After every turn of a node its invariants are checked, and every write that lands is checked against
the owners of the pages it reads and writes.
"""

import random
from typing import Any

from common.events import FromPeer, FromRouter, PeerClosed, PeerProbed, RouterLost
from common.messages import (
    Cancel,
    Generate,
    Incarnation,
    PeerGone,
    PeerMemory,
)
from common.plan import (
    CacheChanged,
    Outgoing,
    ToRouterMsg,
    TransferCommand,
)
from common.scheduler import Scheduler
from decode_node.scheduler import DecodeScheduler
from prefill_node.scheduler import PrefillScheduler
from tests.unit.scheduler.adapters import Adapters
from tests.unit.scheduler.client import ModelRouter
from tests.unit.scheduler.compiler import FakeCompiler
from tests.unit.scheduler.fabric import Fabric
from tests.unit.scheduler.loader import Disk, FakeLoader
from tests.unit.scheduler.model import FakeRunner, Memory, Violation
from tests.unit.scheduler.network import Network, memory
from tests.unit.scheduler.node_settings import LEASE_S, PAGE_BYTES, settings
from tests.unit.scheduler.real_router import RealRouter
from tests.unit.scheduler.virtual_node import Node, WatchedSteps

ROUTER = "router-1"
TICK_S = 0.1
LONGEST_STEP_S = 1.5
"""Long enough for pages to be named to a peer, and for what it writes to arrive."""
LATE_NOTIFICATIONS = 0.2
"""Share of notifications that come long after their bytes."""


class World:
    """`step()` lets something happen; `settle()` heals everything and runs until nothing does."""

    def __init__(
        self,
        seed: int,
        prefills: int = 1,
        decodes: int = 1,
        pages: int = 24,
        loss: float = 0.0,
        repeat: float = 0.0,
        reorder: bool = False,
        local: float = 0.0,
        pieces: float = 0.0,
        router: type[ModelRouter] | type[RealRouter] = ModelRouter,
        overlap: bool = False,
        **overrides: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.overlap = random.Random(seed) if overlap else None
        """If there is one, nodes decide a step while the one before it runs."""
        self.now = 0.0
        self.repeat = repeat
        self.local = local
        """Share of requests that decode computes alone; if there is one, it does so always where
        no prefill node takes work."""
        self.lease_s = LEASE_S
        self.network = Network(self, loss, repeat, reorder)
        self.pages, self.overrides = pages, overrides
        self.nodes: dict[Incarnation, Node] = {}
        self.fabric = Fabric(self, pieces)
        self.late_notifications = LATE_NOTIFICATIONS if reorder else 0.0
        self.born = 0
        self.left: list[Incarnation] = []
        self.disk = Disk()
        self.adapters = Adapters(self)
        self.router = router(self)
        for _ in range(prefills):
            self.add_prefill()
        for _ in range(decodes):
            self.add_decode()

    # ------------------------------------------------------------ nodes

    def add_prefill(self) -> Incarnation:
        self.born += 1
        name = f"p{self.born}"
        scheduler = PrefillScheduler(settings(name, self.pages, **self.overrides), PAGE_BYTES)
        return self._add(name, scheduler)

    def add_decode(self) -> Incarnation:
        self.born += 1
        name = f"d{self.born}"
        scheduler = DecodeScheduler(
            settings(name, self.pages, **self.overrides), reserve_pages=2, local_chunk_size=3
        )
        return self._add(name, scheduler)

    def _add(self, name: Incarnation, scheduler: Scheduler[Any]) -> Incarnation:
        memory = Memory(self.pages)
        loader = FakeLoader(self.disk, self.random, scheduler.settings)
        compiler = FakeCompiler(self.random)
        runner = FakeRunner(memory, loader.slots, compiler.ready, chance=self.overlap)
        steps = WatchedSteps(scheduler, runner, lambda: self.now)
        self.nodes[name] = Node(scheduler, memory, runner, loader, compiler, steps)
        return name

    def prefills(self) -> list[Incarnation]:
        return [n for n in self.nodes if n.startswith("p")]

    def decodes(self) -> list[Incarnation]:
        return [n for n in self.nodes if n.startswith("d")]

    def kill(self, name: Incarnation) -> None:
        """kill -9: its queued messages are gone, and its writes but for what its kernel has."""
        self._remove(name)
        self.router.on_node_lost(name)
        for node in self.nodes.values():
            if self.random.random() < 0.7:
                node.inbox.append(FromRouter(ROUTER, PeerGone(name)))

    def _remove(self, name: Incarnation) -> None:
        self.fabric.on_killed(name)
        del self.nodes[name]
        self.network.forget(name)
        self.adapters.forget(name)

    def freeze(self, name: Incarnation, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        self.nodes[name].frozen_until = self.now + seconds

    def cut(self, one: Incarnation, other: Incarnation, seconds: float) -> None:
        """No byte passes between the two."""
        self.network.cuts[frozenset((one, other))] = self.now + seconds

    def _leave(self, name: Incarnation) -> None:
        """A drained node ends: nothing of its own, and nothing into it, may be under way."""
        touching = self.fabric.touches(name)
        if touching and self.nodes[name].scheduler.is_empty:
            raise Violation(f"{name} ended while a write from it or into it is posted")
        self.left.append(name)
        self._remove(name)
        self.router.on_node_left(name)

    def break_router_link(self, name: Incarnation) -> None:
        """Messages between the router and one node are lost; both sides notice."""
        node = self.nodes[name]
        node.inbox.clear()
        node.inbox.append(RouterLost(ROUTER))
        self.router.forget_pending(name)
        self.router.on_node_lost(name)

    # ------------------------------------------------------------ time

    def tick(self) -> None:
        self.now += TICK_S
        self.network.beat()
        for name in list(self.nodes):
            self.turn(name)
        self.network.deliver()
        self.fabric.land()
        self.adapters.turn()
        self.router.turn()

    def turn(self, name: Incarnation) -> None:
        """One turn of a node's event loop."""
        node = self.nodes[name]
        if node.frozen_until > self.now or (node.awaits_step_until or 0.0) > self.now:
            return
        if node.awaits_step_until is not None:
            self._end_turn(node)
        scheduler = node.scheduler
        while node.inbox:
            scheduler.handle(node.inbox.popleft(), self.now)
        while node.verbs:
            node.between_steps().change_adapters(*node.verbs.popleft())
        for event in node.loader.poll(self.now):
            scheduler.on_adapter(event, self.now)
        for compiled in node.compiler.poll(self.now):
            scheduler.on_grammar(compiled, self.now)
        facts, node.facts = node.facts, []
        for fact in facts:
            if isinstance(fact, FromPeer | PeerClosed | PeerProbed):
                scheduler.handle(fact, self.now)
            else:
                scheduler.on_transfer(fact, self.now)
        plan = scheduler.schedule(self.now)
        for command in plan.transfers:
            self._transfer(name, node, command)
        for message in plan.messages:
            self._send(name, message)
        node.check_told()
        node.loader.submit(plan.adapters, self.now)
        node.compiler.submit(plan.grammars, self.now)
        self.adapters.on_answers(name, plan.answers)
        if scheduler.leave.may_end(self.now, is_empty=scheduler.is_empty):
            node.between_steps()
            self._leave(name)
            return
        if plan.batch is not None and scheduler.paused is not None:
            raise Violation("a paused node computes")
        node.steps.launch(plan.batch)
        node.awaits_step_until = self.now
        if self.overlap is not None and self.overlap.random() < 0.3:
            node.awaits_step_until += self.overlap.uniform(0, LONGEST_STEP_S)
        else:
            self._end_turn(node)

    def _end_turn(self, node: Node) -> None:
        """Its device has computed what it waits for."""
        node.awaits_step_until = None
        node.take_in()
        node.scheduler.take_report()
        node.check()

    def settle(self, limit: int = 3000) -> None:
        """Heal the world, run until requests have ended, pages are home, and who leaves is gone."""
        self.repeat = 0.0
        self.network.heal()
        self.disk.heal()
        for node in self.nodes.values():
            node.frozen_until = 0.0
            node.between_steps().continue_generation()
        for _ in range(limit):
            if self.router.all_ended() and self.quiet():
                return
            self.tick()
        raise Violation(f"not settled: {self.router.open_requests()} {self.describe()}")

    def quiet(self) -> bool:
        return all(
            node.scheduler.kv.num_free == node.scheduler.kv.num_pages
            and not node.scheduler.unfinished()
            and not node.steps
            and not node.scheduler.leave.under_way
            and node.loader.is_idle
            and node.compiler.is_idle
            for node in self.nodes.values()
        )

    def describe(self) -> str:
        return "; ".join(
            f"{name}: {node.scheduler.stats().queues} free {node.scheduler.kv.num_free}"
            for name, node in self.nodes.items()
        )

    def runs(self, name: Incarnation) -> bool:
        """Whether the process exists and is not stopped."""
        node = self.nodes.get(name)
        return node is not None and node.frozen_until <= self.now

    def memory_of(self, name: Incarnation) -> PeerMemory:
        return memory(name, self.pages, PAGE_BYTES)

    def _send(self, name: Incarnation, message: Outgoing) -> None:
        if isinstance(message, CacheChanged):
            self.nodes[name].hear(message)
        elif isinstance(message, ToRouterMsg):
            self.router.receive(name, message.body)
        else:
            self.network.carry_out(name, message)

    def _transfer(self, name: Incarnation, node: Node, command: TransferCommand) -> None:
        self.fabric.carry_out(name, node, command)


__all__ = ["ROUTER", "Cancel", "Generate", "World"]
