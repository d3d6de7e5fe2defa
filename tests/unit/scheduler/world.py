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
    decode_notification,
)
from common.plan import (
    AddPeer,
    CacheChanged,
    ExpectWrites,
    Notified,
    Outgoing,
    PeerAdded,
    RemovePeer,
    RenewLease,
    ToRouterMsg,
    TransferCommand,
    Write,
    WriteDone,
    WriteFailed,
)
from common.scheduler import Scheduler
from decode_node.scheduler import DecodeScheduler
from prefill_node.scheduler import PrefillScheduler
from tests.unit.scheduler.adapters import Adapters
from tests.unit.scheduler.client import ModelRouter
from tests.unit.scheduler.compiler import FakeCompiler
from tests.unit.scheduler.loader import Disk, FakeLoader
from tests.unit.scheduler.model import FakeRunner, Memory, PostedWrite, Violation
from tests.unit.scheduler.network import Network, memory
from tests.unit.scheduler.node_settings import LEASE_S, PAGE_BYTES, POST_S, settings
from tests.unit.scheduler.real_router import RealRouter
from tests.unit.scheduler.virtual_node import Node, WatchedSteps

ROUTER = "router-1"
TICK_S, TCP_TIMEOUT_S = 0.1, 10.0
LATE_S = 0.7
"""Longest that bytes are on their way after their sender's end, or after a network heals."""
LONGEST_STEP_S = 1.5
"""Long enough for pages to be named to a peer, and for what it writes to arrive."""
LATE_NOTIFICATIONS, NOTIFIED_LATE_S = 0.2, 6.0
"""Share of notifications that come long after their bytes, and by how much at most: past the lease,
when the pages may have new owners."""


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
        self.writes: list[PostedWrite] = []
        self.notifications: list[tuple[float, Incarnation, Notified]] = []
        """On their way: when, to whom, what."""
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
        for posted in [w for w in self.writes if w.source == name]:
            posted.content = self._content(posted)
            posted.due = min(posted.due, self.now + LATE_S)
            if posted.needs_source:
                self.writes.remove(posted)
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
        touching = any(name in (w.source, w.write.peer) for w in self.writes)
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
        self.land()
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

    # ------------------------------------------------------------ the transfer backend

    def _transfer(self, name: Incarnation, node: Node, command: TransferCommand) -> None:
        match command:
            case AddPeer(peer, _):
                node.peers.add(peer)
                node.facts.append(PeerAdded(peer))
            case RemovePeer(peer):
                node.peers.discard(peer)
                node.leases.pop(peer, None)
            case RenewLease(peer, until):
                node.leases[peer] = until
            case Write():
                lease = node.leases.get(command.peer, 0.0)
                if command.peer not in node.peers or self.now >= lease:
                    node.facts.append(WriteFailed(command.room, command.chunk, "not posted"))
                else:
                    due = self.now + self.random.uniform(0, POST_S)
                    needs_source = self.random.random() < 0.5
                    self.writes.append(PostedWrite(name, command, due, needs_source))
            case ExpectWrites():
                pass

    def land(self) -> None:
        """Bytes arrive. Some of a stopped process's writes wait for it, some are with the kernel
        already; a cut holds all of them back, and a network that heals delivers them after up to
        the same time once more, as the kernels repeat, unless that took too long for them."""
        for posted in list(self.writes):
            if self.network.is_cut(posted.source, posted.write.peer):
                posted.held_since = self.now if posted.held_since is None else posted.held_since
                if self.now - posted.held_since > TCP_TIMEOUT_S:
                    self._give_up(posted)
            elif posted.held_since is not None:
                outage_s, posted.held_since = self.now - posted.held_since, None
                posted.due = self.now + self.random.uniform(0, max(LATE_S, outage_s))
            elif posted.due <= self.now and (self.runs(posted.source) or not posted.needs_source):
                self.writes.remove(posted)
                self._land(posted)
        self._hand_out_notifications()

    def _give_up(self, posted: PostedWrite) -> None:
        """TCP's user time-out: nothing of it is sent any more."""
        self.writes.remove(posted)
        source = self.nodes.get(posted.source)
        if source is not None:
            write = posted.write
            source.facts.append(WriteFailed(write.room, write.chunk, "the connection timed out"))

    def _land(self, posted: PostedWrite) -> None:
        source, write = self.nodes.get(posted.source), posted.write
        target = self.nodes.get(write.peer)
        if source is not None:
            req = source.scheduler._reqs.get(write.room)
            if req is None or not set(write.source_pages) <= set(req.pages):
                raise Violation(f"{posted.source} freed pages that a posted write reads")
            if target is None or self.random.random() < self.network.loss / 4:
                failed = WriteFailed(write.room, write.chunk, "planted transfer failure")
                source.facts.append(failed)
                return
        if target is None:
            return
        self._check_target(target, write)
        content = posted.content or self._content(posted)
        for cells, there in zip(content, write.target_pages, strict=True):
            target.memory.cells[there] = list(cells)
        if source is not None:
            source.facts.append(WriteDone(write.room, write.chunk, len(write.source_pages), 0.01))
        self._notify(write.peer, Notified(write.notification))

    def _notify(self, peer: Incarnation, notified: Notified) -> None:
        """The word of a write that landed: it may be lost, come twice, or long after the bytes."""
        copies = 0 if self.random.random() < self.network.loss / 4 else 1
        copies += self.random.random() < self.network.repeat
        for _ in range(copies):
            is_late = self.random.random() < self.late_notifications
            late_s = self.random.uniform(0, NOTIFIED_LATE_S) if is_late else 0.0
            self.notifications.append((self.now + late_s, peer, notified))

    def _hand_out_notifications(self) -> None:
        due = [entry for entry in self.notifications if entry[0] <= self.now]
        for entry in due:
            self.notifications.remove(entry)
            target = self.nodes.get(entry[1])
            if target is not None:
                place = len(target.facts)
                if self.network.reorder:
                    place = self.random.randint(0, place)
                target.facts.insert(place, entry[2])

    def _content(self, posted: PostedWrite) -> list[list[int | None]]:
        memory = self.nodes[posted.source].memory
        return [list(memory.cells[page]) for page in posted.write.source_pages]

    def _check_target(self, target: Node, write: Write) -> None:
        """A write may land in pages of its own room, or set aside for it; never in another's."""
        for req in target.scheduler._reqs.values():
            if req.room != write.room and set(write.target_pages) & set(req.pages):
                raise Violation(
                    f"{decode_notification(write.notification)} hits pages of {req.rid}"
                )
        cached = {entry.page for entry in target.scheduler.kv._cache._entries.values()}
        if cached & set(write.target_pages):
            raise Violation(f"{decode_notification(write.notification)} hits cached pages")


__all__ = ["ROUTER", "Cancel", "Generate", "World"]
