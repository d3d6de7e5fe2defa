"""A whole cluster in virtual time: real schedulers, a lossy side channel, writes that take a while.

The wire between decode and prefill loses, repeats and reorders. The router link is ordered and
breaks as a whole, as `common/node_io` guarantees. Nodes can be killed, replaced, frozen and paused.
After every turn of a node its invariants are checked, and every write that lands is checked against
the owners of the pages it reads and writes.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from common.events import FromPeer, FromRouter, PeerSilent, RouterLost
from common.messages import (
    WIRE_VERSION,
    Cancel,
    Fingerprint,
    Generate,
    Incarnation,
    PeerBye,
    PeerGone,
    PeerHello,
    PeerMemory,
    PeerRefused,
    PeerWelcome,
    Ping,
    Pong,
    decode_notification,
)
from common.plan import (
    AddPeer,
    DialPeer,
    ExpectWrites,
    HangUp,
    Notified,
    Outgoing,
    PeerAdded,
    RemovePeer,
    RenewLease,
    ToPeerMsg,
    ToRouterMsg,
    TransferCommand,
    Write,
    WriteDone,
    WriteFailed,
)
from common.scheduler import Scheduler
from common.settings import SchedulerSettings
from decode_node.scheduler import DecodeScheduler
from prefill_node.scheduler import PrefillScheduler
from tests.unit.scheduler.client import ModelRouter
from tests.unit.scheduler.model import PAGE, VOCAB, FakeRunner, Memory, PostedWrite, Violation
from tests.unit.scheduler.real_router import RealRouter

ROUTER = "router-1"
FINGERPRINT = Fingerprint(
    wire_version=WIRE_VERSION,
    model="m",
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    page_size=PAGE,
)
LEASE_S, POST_S, PEER_TIMEOUT_S, TICK_S = 4.0, 1.0, 2.0, 0.1
PAGE_BYTES = 64


def settings(incarnation: str, num_pages: int, **overrides: Any) -> SchedulerSettings:
    values: dict[str, Any] = {
        "incarnation": incarnation,
        "fingerprint": FINGERPRINT,
        "num_pages": num_pages,
        "page_size": PAGE,
        "vocab_size": VOCAB,
        "max_model_len": 200,
        "max_running_requests": 4,
        "chunk_size": 6,
        "twin_timeout_s": 8.0,
        "transfer_timeout_s": 20.0,
        "lease_s": LEASE_S,
        "longest_post_s": POST_S,
        "sync_s": 0.5,
        "drain_s": 3.0,
    }
    return SchedulerSettings(**values | overrides)


@dataclass
class Node:
    scheduler: Scheduler[Any]
    memory: Memory
    runner: FakeRunner
    inbox: deque[FromRouter | RouterLost] = field(default_factory=deque)
    facts: list[Any] = field(default_factory=list)
    frozen_until: float = 0.0
    dialled: dict[Incarnation, float] = field(default_factory=dict)
    """Decode: when each prefill was last heard; present until hung up."""
    welcomed: set[Incarnation] = field(default_factory=set)
    linked: dict[Incarnation, float] = field(default_factory=dict)
    """Prefill: when each decode was last heard."""
    leases: dict[Incarnation, float] = field(default_factory=dict)
    peers: set[Incarnation] = field(default_factory=set)
    """Prefill: what the transfer backend knows."""

    @property
    def takes_work(self) -> bool:
        return self.scheduler.paused is None and not self.scheduler.leave.under_way


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
        router: type[ModelRouter] | type[RealRouter] = ModelRouter,
        **overrides: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.loss, self.repeat, self.reorder = loss, repeat, reorder
        self.pages, self.overrides = pages, overrides
        self.nodes: dict[Incarnation, Node] = {}
        self.wire: list[tuple[Incarnation, Incarnation, Any]] = []
        self.writes: list[PostedWrite] = []
        self.born = 0
        self.left: list[Incarnation] = []
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
        scheduler = DecodeScheduler(settings(name, self.pages, **self.overrides), reserve_pages=2)
        return self._add(name, scheduler)

    def _add(self, name: Incarnation, scheduler: Scheduler[Any]) -> Incarnation:
        memory = Memory(self.pages)
        self.nodes[name] = Node(scheduler, memory, FakeRunner(memory))
        return name

    def prefills(self) -> list[Incarnation]:
        return [n for n in self.nodes if n.startswith("p")]

    def decodes(self) -> list[Incarnation]:
        return [n for n in self.nodes if n.startswith("d")]

    def kill(self, name: Incarnation) -> None:
        """kill -9: its queued messages and writes are gone; peers notice by silence."""
        self._remove(name)
        self.router.on_node_lost(name)

    def _remove(self, name: Incarnation) -> None:
        del self.nodes[name]
        self.writes = [w for w in self.writes if w.source != name]
        for node in self.nodes.values():
            node.inbox.append(FromRouter(ROUTER, PeerGone(name)))

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
        self._heartbeats()
        for name in list(self.nodes):
            self.turn(name)
        self.deliver(len(self.wire))
        self.land()
        self.router.turn()

    def turn(self, name: Incarnation) -> None:
        """One turn of a node's event loop."""
        node = self.nodes[name]
        if node.frozen_until > self.now:
            return
        scheduler = node.scheduler
        while node.inbox:
            scheduler.handle(node.inbox.popleft(), self.now)
        facts, node.facts = node.facts, []
        for fact in facts:
            if isinstance(fact, FromPeer | PeerSilent):
                scheduler.handle(fact, self.now)
            else:
                scheduler.on_transfer(fact, self.now)
        plan = scheduler.schedule(self.now)
        for command in plan.transfers:
            self._transfer(name, node, command)
        for message in plan.messages:
            self._send(name, node, message)
        if scheduler.leave.may_end(self.now, is_empty=scheduler.is_empty):
            self._leave(name)
            return
        if plan.batch is not None:
            if scheduler.paused is not None:
                raise Violation("a paused node computes")
            try:
                result = node.runner.run(plan.batch)
            except RuntimeError as error:
                scheduler.process_batch_failure(str(error), self.now)
            else:
                scheduler.process_batch_result(result, self.now)
        scheduler.take_report()
        scheduler.check_invariants()

    def settle(self, limit: int = 3000) -> None:
        """Heal the world, run until requests have ended, pages are home, and who leaves is gone."""
        self.loss = self.repeat = 0.0
        for node in self.nodes.values():
            node.frozen_until = 0.0
            node.scheduler.continue_generation()
        for _ in range(limit):
            if self.router.all_ended() and self.quiet():
                return
            self.tick()
        raise Violation(f"not settled: {self.router.open_requests()} {self.describe()}")

    def quiet(self) -> bool:
        return all(
            node.scheduler.kv.num_free == node.scheduler.kv.num_pages
            and not node.scheduler.unfinished()
            and not node.scheduler.leave.under_way
            for node in self.nodes.values()
        )

    def describe(self) -> str:
        return "; ".join(
            f"{name}: {node.scheduler.stats().queues} free {node.scheduler.kv.num_free}"
            for name, node in self.nodes.items()
        )

    # ------------------------------------------------------------ the I/O threads

    def _heartbeats(self) -> None:
        for d in self.decodes():
            for p in list(self.nodes[d].dialled):
                self._heartbeat(d, p)
        for p in self.prefills():
            for d, heard in list(self.nodes[p].linked.items()):
                if self.now - heard > PEER_TIMEOUT_S:
                    del self.nodes[p].linked[d]
                    self.nodes[p].facts.append(PeerSilent(d))

    def _heartbeat(self, d: Incarnation, p: Incarnation) -> None:
        """Prefill pings a linked decode, which answers; an unlinked one says hello again."""
        decode, prefill = self.nodes[d], self.nodes.get(p)
        alive = prefill is not None and self.now >= prefill.frozen_until
        if prefill is not None and alive and p not in decode.welcomed:
            memory = self._memory(d)
            self._post(d, p, PeerHello(fingerprint=FINGERPRINT, memory=memory, lease_s=LEASE_S))
        if prefill is not None and alive and d in prefill.linked:
            decode.dialled[p] = self.now
            paused = prefill.scheduler.paused is not None
            decode.facts.append(FromPeer(p, Ping(self.now, paused)))
            if self.now >= decode.frozen_until:
                prefill.linked[d] = self.now
                prefill.facts.append(FromPeer(d, Pong(heard=self.now, lease_s=LEASE_S)))
        elif self.now - decode.dialled[p] > PEER_TIMEOUT_S:
            self._forget(decode, p)
            decode.facts.append(PeerSilent(p))

    def _memory(self, name: Incarnation) -> PeerMemory:
        return PeerMemory(
            agent_name=name,
            metadata=b"m",
            base_address=4096,
            num_pages=self.pages,
            page_bytes=PAGE_BYTES,
        )

    def _forget(self, decode: Node, peer: Incarnation) -> None:
        decode.dialled.pop(peer, None)
        decode.welcomed.discard(peer)

    def _send(self, name: Incarnation, node: Node, message: Outgoing) -> None:
        match message:
            case ToRouterMsg(_, body):
                self.router.receive(name, body)
            case ToPeerMsg(peer, body):
                self._post(name, peer, body)
            case DialPeer(peer, _):
                node.dialled[peer] = self.now
            case HangUp(peer):
                self._forget(node, peer)
                node.linked.pop(peer, None)
                if name.startswith("d"):
                    self._post(name, peer, PeerBye())

    def _post(self, source: Incarnation, target: Incarnation, body: Any) -> None:
        copies = 0 if self.random.random() < self.loss else 1
        copies += self.random.random() < self.repeat
        self.wire += [(source, target, body)] * copies

    def deliver(self, count: int) -> None:
        """Hand over messages that are on the wire, in some order."""
        if self.reorder:
            self.random.shuffle(self.wire)
        due, self.wire = self.wire[:count], self.wire[count:]
        for source, target, body in due:
            node = self.nodes.get(target)
            if node is None:
                continue
            if isinstance(body, PeerHello):
                node.linked[source] = self.now
            if isinstance(body, PeerWelcome) and source in node.dialled:
                node.welcomed.add(source)
            if isinstance(body, PeerRefused) and source not in node.dialled:
                continue
            if isinstance(body, PeerBye) and target.startswith("d") and source not in node.dialled:
                continue
            node.facts.append(FromPeer(source, body))

    # ------------------------------------------------------------ the transfer backend

    def _transfer(self, name: Incarnation, node: Node, command: TransferCommand) -> None:
        match command:
            case AddPeer(peer, _):
                node.peers.add(peer)
                node.facts.append(PeerAdded(peer))
            case RemovePeer(peer):
                node.peers.discard(peer)
            case RenewLease(peer, until):
                node.leases[peer] = until
            case Write():
                lease = node.leases.get(command.peer, 0.0)
                if command.peer not in node.peers or self.now >= lease:
                    node.facts.append(WriteFailed(command.room, command.chunk, "not posted"))
                else:
                    due = self.now + self.random.uniform(0, POST_S)
                    self.writes.append(PostedWrite(name, command, due))
            case ExpectWrites():
                pass

    def land(self) -> None:
        for posted in [w for w in self.writes if w.due <= self.now]:
            self.writes.remove(posted)
            self._land(posted)

    def _land(self, posted: PostedWrite) -> None:
        source, write = self.nodes[posted.source], posted.write
        target = self.nodes.get(write.peer)
        req = source.scheduler._reqs.get(write.room)
        if req is None or not set(write.source_pages) <= set(req.pages):
            raise Violation(f"{posted.source} freed pages that a posted write reads")
        if target is None or self.random.random() < self.loss / 4:
            source.facts.append(WriteFailed(write.room, write.chunk, "planted transfer failure"))
            return
        self._check_target(target, write)
        for here, there in zip(write.source_pages, write.target_pages, strict=True):
            target.memory.cells[there] = list(source.memory.cells[here])
        source.facts.append(WriteDone(write.room, write.chunk, len(write.source_pages), 0.01))
        target.facts.insert(
            self.random.randint(0, len(target.facts)) if self.reorder else len(target.facts),
            Notified(write.notification),
        )

    def _check_target(self, target: Node, write: Write) -> None:
        """A write may land in pages of its own room, or set aside for it; never in another's."""
        for req in target.scheduler._reqs.values():
            if req.room != write.room and set(write.target_pages) & set(req.pages):
                raise Violation(
                    f"{decode_notification(write.notification)} hits pages of {req.rid}"
                )


__all__ = ["ROUTER", "Cancel", "Generate", "World", "settings"]
