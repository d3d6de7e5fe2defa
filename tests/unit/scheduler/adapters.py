"""The cluster's adapters in the virtual cluster: what a router makes every node hold.

Level-triggered: each turn every node is asked to load what it lacks and to unload what is no longer
wanted, one verb for each name at a time; what it refuses is asked again. An unload waits for the
requests of the adapter, as the router does, or is `rude`, as another router's would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.events import AdminDone
from common.messages import Adapter, Incarnation, LoadAdapter, UnloadAdapter
from tests.unit.scheduler.model import Violation

if TYPE_CHECKING:
    from tests.unit.scheduler.world import World


@dataclass
class Wanted:
    adapter: Adapter
    path: str
    pinned: bool = False
    going: bool = False
    """Unloaded as soon as no request of it is left."""
    by_hand: bool = False
    """The test unloads it from node after node: it is not loaded again there."""


@dataclass
class Adapters:
    """What is wanted, what was asked of whom, and what became of it."""

    world: World
    wanted: dict[str, Wanted] = field(default_factory=dict)
    asked: dict[int, tuple[Incarnation, LoadAdapter | UnloadAdapter]] = field(default_factory=dict)
    """Ticket -> who was asked what, until it is answered."""
    answers: list[tuple[Incarnation, LoadAdapter | UnloadAdapter, AdminDone]] = field(
        default_factory=list
    )
    last_ticket: int = 0

    def load(self, name: str, *, pinned: bool = False, content: str = "") -> Adapter:
        """Have every node hold `name`, from a path of its own for each content."""
        content = content or f"digest-of-{name}"
        path = f"/{name}/{content}"
        self.world.disk.files[path] = content
        adapter = Adapter(name, content)
        self.wanted[name] = Wanted(adapter, path, pinned)
        return adapter

    def unload(self, name: str, *, rude: bool = False) -> None:
        if rude:
            del self.wanted[name]
        else:
            self.wanted[name].going = True

    def serving(self, adapter: Adapter | None) -> list[Incarnation]:
        """Nodes that may be given a request of `adapter`."""
        if adapter is None:
            return list(self.world.nodes)
        return [
            name
            for name, node in self.world.nodes.items()
            if any(Adapter(i.name, i.digest) == adapter for i in node.scheduler.adapters)
        ]

    def is_gone(self, adapter: Adapter | None) -> bool:
        """Whether no node will ever take a request of it again."""
        if adapter is None:
            return False
        wanted = self.wanted.get(adapter.name)
        return wanted is None or wanted.adapter != adapter

    def turn(self) -> None:
        for name in [n for n, wanted in self.wanted.items() if wanted.going]:
            mine = self.wanted[name].adapter
            if not any(c.adapter == mine and c.end is None for c in self.world.router.clients):
                del self.wanted[name]
        self.world.router.settle_adapters(self.wanted)
        for node in self.world.nodes:
            for verb in self._due(node):
                self.ask(node, verb)

    def ask(self, node: Incarnation, verb: LoadAdapter | UnloadAdapter) -> int:
        """Send a verb to a node; returns its ticket."""
        self.last_ticket += 1
        self.asked[self.last_ticket] = (node, verb)
        self.world.nodes[node].verbs.append((self.last_ticket, verb))
        return self.last_ticket

    def _due(self, node: Incarnation) -> list[LoadAdapter | UnloadAdapter]:
        scheduler = self.world.nodes[node].scheduler
        busy = {verb.name for who, verb in self.asked.values() if who == node}
        held = {info.name: info.digest for info in scheduler.adapters}
        due: list[LoadAdapter | UnloadAdapter] = []
        for name, wanted in self.wanted.items():
            if name in busy or name in held or wanted.by_hand or scheduler.leave.under_way:
                continue
            digest, pinned = wanted.adapter.digest, wanted.pinned
            due.append(LoadAdapter(name=name, path=wanted.path, pinned=pinned, digest=digest))
        for name, digest in held.items():
            mine = self.wanted.get(name)
            if name not in busy and (mine is None or mine.adapter.digest != digest):
                due.append(UnloadAdapter(name))
        return due

    def on_answers(self, node: Incarnation, answers: Sequence[AdminDone]) -> None:
        for done in answers:
            if done.ticket not in self.asked:
                raise Violation(f"{node} answers ticket {done.ticket} twice, or one of nobody")
            who, verb = self.asked.pop(done.ticket)
            if who != node:
                raise Violation(f"{node} answers what {who} was asked")
            self.answers.append((node, verb, done))

    def forget(self, node: Incarnation) -> None:
        """A process has ended."""
        self.asked = {t: (who, verb) for t, (who, verb) in self.asked.items() if who != node}

    def refused(self) -> list[str]:
        return [done.message for _, _, done in self.answers if not done.ok]
