"""The transfer backends of the virtual cluster: writes that take a while, break, or land in halves.

A write may travel in two pieces, as between nodes of several ranks: each brings half the KV heads
of its pages, has a fate of its own, and a page with one half of two is garbage to whoever reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.messages import Incarnation, decode_notification
from common.plan import (
    AddPeer,
    ExpectWrites,
    Notified,
    PeerAdded,
    PieceLanded,
    PiecesDropped,
    RemovePeer,
    RenewLease,
    TransferCommand,
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from tests.unit.scheduler.model import Violation
from tests.unit.scheduler.node_settings import POST_S
from tests.unit.scheduler.virtual_node import Node
from transfer.pieces import wrapped

if TYPE_CHECKING:
    from tests.unit.scheduler.world import World

TCP_TIMEOUT_S = 10.0
LATE_S = 0.7
"""Longest that bytes are on their way after their sender's end, or after a network heals."""
NOTIFIED_LATE_S = 6.0
"""How long after their bytes notifications may come: past the lease, when the pages may have new
owners."""

LANDED = (Notified, PieceLanded, PiecesDropped)

Cells = list[int | None]


@dataclass
class Fate:
    """What becomes of a write: it ends when all its pieces have."""

    num_open: int
    error: str | None = None


@dataclass
class PostedPiece:
    """A write under way, or half of one: it lands or fails at some later time, its notification
    comes later still."""

    source: Incarnation
    write: Write
    due: float
    fate: Fate
    half: int | None = None
    """0 or 1 of two pieces; None: all of it."""
    needs_source: bool = False
    """It goes on only while its process runs: it was stopped before, or within, the post."""
    held_since: float | None = None
    """A cut keeps it back."""
    content: list[Cells] | None = None
    """Once its process has ended: what the kernel still sends."""

    @property
    def notification(self) -> bytes:
        if self.half is None:
            return self.write.notification
        return wrapped(self.write.notification, self.half, 2, self.source)


def _marker(state: int, half: int) -> int:
    """What a position holds that has got half of its KV."""
    return -(2 * state + half) - 10


def put(old: int | None, new: int | None, half: int | None) -> int | None:
    """What a position holds once `new`, or half of it, has come over `old`."""
    if half is None or new is None or old in (new, _marker(new, 1 - half)):
        return new
    return _marker(new, half)


class Fabric:
    """All transfer backends of a `World`. `pieces`: the share of writes that travel in two."""

    def __init__(self, world: World, pieces: float) -> None:
        self.world = world
        self.pieces = pieces
        self.posted: list[PostedPiece] = []
        self.notifications: list[tuple[float, Incarnation, bytes]] = []
        """On their way: when, to whom, what."""

    def touches(self, name: Incarnation) -> bool:
        """Whether anything is under way from a node or into it."""
        return any(name in (posted.source, posted.write.peer) for posted in self.posted)

    def on_killed(self, name: Incarnation) -> None:
        """Of its writes only what the kernel has will still arrive."""
        for posted in [posted for posted in self.posted if posted.source == name]:
            posted.content = self._content(posted)
            posted.due = min(posted.due, self.world.now + LATE_S)
            if posted.needs_source:
                self.posted.remove(posted)

    # ------------------------------------------------------------ commands

    def carry_out(self, name: Incarnation, node: Node, command: TransferCommand) -> None:
        match command:
            case AddPeer(peer, _):
                node.peers.add(peer)
                node.facts.append(PeerAdded(peer))
            case RemovePeer(peer):
                node.peers.discard(peer)
                node.leases.pop(peer, None)
                node.facts += node.gatherer.forget(peer)
            case RenewLease(peer, until):
                node.leases[peer] = until
            case Write():
                lease = node.leases.get(command.peer, 0.0)
                if command.peer not in node.peers or self.world.now >= lease:
                    node.facts.append(WriteFailed(command.room, command.chunk, "not posted"))
                else:
                    self._post(name, command)
            case ExpectWrites():
                pass

    def _post(self, name: Incarnation, write: Write) -> None:
        chance = self.world.random
        in_two = self.pieces > 0 and chance.random() < self.pieces
        halves = (0, 1) if in_two else (None,)
        fate = Fate(len(halves))
        for half in halves:
            due = self.world.now + chance.uniform(0, POST_S)
            needs_source = chance.random() < 0.5
            self.posted.append(PostedPiece(name, write, due, fate, half, needs_source))

    # ------------------------------------------------------------ bytes

    def land(self) -> None:
        """Bytes arrive. Some of a stopped process's writes wait for it, some are with the kernel
        already; a cut holds all of them back, and a network that heals delivers them after up to
        the same time once more, as the kernels repeat, unless that took too long for them."""
        world = self.world
        for posted in list(self.posted):
            if world.network.is_cut(posted.source, posted.write.peer):
                posted.held_since = world.now if posted.held_since is None else posted.held_since
                if world.now - posted.held_since > TCP_TIMEOUT_S:
                    self._end(posted, "the connection timed out")
            elif posted.held_since is not None:
                outage_s, posted.held_since = world.now - posted.held_since, None
                posted.due = world.now + world.random.uniform(0, max(LATE_S, outage_s))
            elif posted.due <= world.now and (world.runs(posted.source) or not posted.needs_source):
                self._land(posted)
        self._hand_out_notifications()

    def _end(self, posted: PostedPiece, error: str | None) -> None:
        """Nothing of it is sent any more. Its node hears of it with the last of its pieces."""
        self.posted.remove(posted)
        fate, write = posted.fate, posted.write
        fate.num_open -= 1
        fate.error = fate.error or error
        source = self.world.nodes.get(posted.source)
        if source is None or fate.num_open:
            return
        if fate.error is None:
            done = WriteDone(write.room, write.chunk, len(write.source_pages), 0.01)
            source.facts.append(done)
        else:
            source.facts.append(WriteFailed(write.room, write.chunk, fate.error))

    def _land(self, posted: PostedPiece) -> None:
        world, write = self.world, posted.write
        source, target = world.nodes.get(posted.source), world.nodes.get(write.peer)
        if source is not None:
            req = source.scheduler._reqs.get(write.room)
            if req is None or not set(write.source_pages) <= set(req.pages):
                raise Violation(f"{posted.source} freed pages that a posted write reads")
            if target is None or world.random.random() < world.network.loss / 4:
                self._end(posted, "planted transfer failure")
                return
        if target is not None:
            self._check_target(target, write)
            content = posted.content or self._content(posted)
            for new, page in zip(content, write.target_pages, strict=True):
                cells = target.memory.cells[page]
                cells[:] = [put(*pair, posted.half) for pair in zip(cells, new, strict=True)]
        self._end(posted, None)
        if target is not None:
            self._notify(write.peer, posted.notification)

    def _content(self, posted: PostedPiece) -> list[Cells]:
        memory = self.world.nodes[posted.source].memory
        return [list(memory.cells[page]) for page in posted.write.source_pages]

    def _check_target(self, target: Node, write: Write) -> None:
        """A write may land in pages of its own room, or set aside for it; never in another's."""
        what = decode_notification(write.notification)
        for req in target.scheduler._reqs.values():
            if req.room != write.room and set(write.target_pages) & set(req.pages):
                raise Violation(f"{what} hits pages of {req.rid}")
        cached = {entry.page for entry in target.scheduler.kv._cache._entries.values()}
        if cached & set(write.target_pages):
            raise Violation(f"{what} hits cached pages")

    # ------------------------------------------------------------ notifications

    def _notify(self, peer: Incarnation, payload: bytes) -> None:
        """The word of what landed: it may be lost, come twice, or long after the bytes."""
        world = self.world
        copies = 0 if world.random.random() < world.network.loss / 4 else 1
        copies += world.random.random() < world.network.repeat
        for _ in range(copies):
            is_late = world.random.random() < world.late_notifications
            late_s = world.random.uniform(0, NOTIFIED_LATE_S) if is_late else 0.0
            self.notifications.append((world.now + late_s, peer, payload))

    def _hand_out_notifications(self) -> None:
        due = [entry for entry in self.notifications if entry[0] <= self.world.now]
        if self.world.network.reorder:
            self.world.random.shuffle(due)
        for entry in due:
            self.notifications.remove(entry)
            target = self.world.nodes.get(entry[1])
            if target is not None:
                self._tell(target, target.gatherer.take(entry[2]))

    def _tell(self, node: Node, events: Sequence[TransferEvent]) -> None:
        """Among what the side channel says in any order, but each after those before it."""
        told = [i for i, fact in enumerate(node.facts) if isinstance(fact, LANDED)]
        first = told[-1] + 1 if told else 0
        for event in events:
            place = len(node.facts)
            if self.world.network.reorder:
                place = self.world.random.randint(first, place)
            node.facts.insert(place, event)
            first = place + 1
