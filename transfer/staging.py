"""Pages go through host memory where the write library cannot reach the device's.

    this node does:  pages ─copy─▶ slots ─┐                 ┌─▶ pages                 it does not
    it does not:     pages ───────────────┴── the library ──┴─▶ slots ─copy─▶ pages   the peer does

Either side may; it is no business of the other's settings. What a peer that stages has to say is in
its `boxes`, which are read like memory: so a peer that dies is noticed there as well, and a node
that is written to stays silent, as `transfer.base` has it. A write is done when it is in the peer's
pages.

The ring is bounded: a write begins when there are slots for its first pages, and holds back those
behind it for the same peer until then. No peer has more than half of what may be outgoing. A write
that waits for longer than its peer's lease fails; what is not posted then never was.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from common.messages import Incarnation, PeerMemory, StageArea
from common.plan import (
    AddPeer,
    ExpectWrites,
    Notified,
    PeerFailed,
    RemovePeer,
    RenewLease,
    TransferCommand,
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from transfer.boxes import Boxes
from transfer.courier import PeerLine, refusals
from transfer.handshake import heads_of, memory_problem, stage_problem
from transfer.landing import Landing
from transfer.poster import Poster
from transfer.slots import Slots
from transfer.stage import PageStage
from transfer.staged_peer import PIECE, UNKNOWN, Sender, StagedPeer

Handle = TypeVar("Handle")
PeerCommand = AddPeer | RemovePeer | RenewLease | Write


class StagedCourier(Generic[Handle]):
    """A `Courier` over a `Poster`, for a node of the pool `memory`; not thread-safe.

    With `stage` and `boxes` this node's pages go through host memory, and what `poster` knows as
    its own pool is that; without, only those of peers that stage do, and all else is passed on.
    """

    def __init__(
        self,
        poster: Poster[Handle],
        memory: PeerMemory,
        clock: Callable[[], float],
        stage: PageStage | None = None,
        boxes: Boxes | None = None,
    ) -> None:
        self._poster = poster
        self._head_bytes = memory.page_bytes // memory.num_heads
        self._stage = stage
        slots = None if stage is None else Slots(stage.num_slots)
        self._sender = Sender(poster, memory, clock, stage, slots)
        self._landing: Landing | None = None
        if stage is not None and slots is not None and boxes is not None:
            heads, num_pages = heads_of(memory), memory.num_pages
            self._landing = Landing(stage, slots, boxes, num_pages, heads, clock)
        self._peers: dict[Incarnation, StagedPeer[Handle]] = {}
        """Those to which pages go through host memory, here or there."""
        self._lines: dict[Incarnation, PeerLine[PeerCommand]] = {}
        """Of each of them, commands that wait."""
        self._events: list[TransferEvent] = []
        self._stopped = False

    @property
    def num_open(self) -> int:
        waiting = sum(len(line) for line in self._lines.values())
        begun = sum(len(peer.deliveries) for peer in self._peers.values())
        landing = 0 if self._landing is None or self._stopped else self._landing.num_open
        return self._poster.num_open + waiting + begun + landing

    @property
    def expecting(self) -> bool:
        return self._poster.expecting

    def take_events(self) -> list[TransferEvent]:
        self._take_in()
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------ commands

    def handle(self, command: TransferCommand) -> None:
        if isinstance(command, ExpectWrites):
            self._poster.handle(command)
            return
        peer = self._peers.get(command.peer)
        if peer is None:
            self._pass_on(command)
            return
        line = self._lines[command.peer]
        if line.lets_pass(command):
            self._poster.handle(command)
        elif not line and not peer.lost and self._is_same(peer, command):
            self._poster.handle(AddPeer(command.peer, (inner_memory(peer.memory),)))
        else:
            line.append(command)
            self._advance_line(peer)

    @staticmethod
    def _is_same(peer: StagedPeer[Handle], command: PeerCommand) -> bool:
        return isinstance(command, AddPeer) and command.memories == (peer.memory,)

    def _pass_on(self, command: PeerCommand) -> None:
        """What concerns no peer that is known here."""
        match command:
            case AddPeer(name, (memory,)) if self._stage is not None or memory.stage is not None:
                problem = memory_problem(memory, self._head_bytes) or stage_problem(memory)
                if problem is not None:
                    self._events.append(PeerFailed(name, problem))
                    return
                self._peers[name] = StagedPeer(name, memory, self._sender)
                self._lines[name] = PeerLine()
                self._poster.handle(AddPeer(name, (inner_memory(memory),)))
            case Write() if self._stage is not None:
                self._events += refusals([command], UNKNOWN)
            case _:
                self._poster.handle(command)

    def _advance_line(self, peer: StagedPeer[Handle]) -> None:
        """Whatever is first and need not wait. A change of the peer waits for its writes."""
        line = self._lines[peer.name]
        while line:
            command = line.first
            match command:
                case Write():
                    begun = peer.begin(command)
                    if begun is False:
                        return
                    line.pop()
                    self._events += [begun] if isinstance(begun, WriteFailed) else []
                case RenewLease():
                    self._poster.handle(line.pop())
                case _:
                    if not peer.deliveries:
                        self._forget(peer)
                    return

    def _forget(self, peer: StagedPeer[Handle]) -> None:
        """What the peer was is done with; what is in line concerns what it is from now on."""
        del self._peers[peer.name]
        line = self._lines.pop(peer.name)
        if line:
            self._pass_on(line.pop())
        while line:
            self.handle(line.pop())

    # ------------------------------------------------------------ progress

    def progress(self) -> None:
        self._poster.progress()
        self._take_in()
        for peer in list(self._peers.values()):
            self._events += peer.advance()
            self._advance_line(peer)
            if peer.lost and not peer.deliveries and self._peers.get(peer.name) is peer:
                self._forget(peer)
        if self._landing is not None:
            self._events += self._landing.progress()

    def _take_in(self) -> None:
        """What the poster says; pieces' ends and notes of stages are for nobody else."""
        for event in self._poster.take_events():
            match event:
                case WriteDone(tag, chunk) | WriteFailed(tag, chunk) if chunk == PIECE:
                    if tag in self._sender.pieces:
                        peer, piece = self._sender.pieces[tag]
                        peer.on_ended(piece, event)
                case Notified(payload) if self._landing is not None:
                    self._landing.take(payload)
                case PeerFailed(name, error) if name in self._peers:
                    self._events.append(event)
                    self._peers[name].lose(error)
                case _:
                    self._events.append(event)
        for look, words in self._poster.take_looks():
            if look.peer in self._peers:
                self._peers[look.peer].on_look(look, words)

    # ------------------------------------------------------------ the end

    def stop(self, reason: str) -> None:
        self._stopped = True
        for line in self._lines.values():
            self._events += line.refuse(reason)
        for peer in self._peers.values():
            peer.stop(reason)
        self._poster.stop(reason)

    def abandon(self, reason: str) -> None:
        if self._stage is not None:
            self._stage.finish()
        for peer in self._peers.values():
            self._events += refusals((each.write for each in peer.deliveries), reason)
            self._events += self._lines[peer.name].refuse(reason)
        self._peers.clear()
        self._lines.clear()
        self._sender.pieces.clear()
        self._poster.abandon(reason)


def inner_memory(memory: PeerMemory) -> PeerMemory:
    """What the write library is to know as the pool: the stage where there is one."""
    if memory.stage is None:
        return memory
    return msgspec.structs.replace(
        memory,
        base_address=memory.stage.address,
        num_pages=memory.stage.num_slots,
        kind="DRAM",
        device_id=0,
    )


def stage_area(stage: PageStage | None, boxes: Boxes | None) -> StageArea | None:
    """What peers are told of a stage; None if there is none."""
    if stage is None or boxes is None:
        return None
    return StageArea(
        address=stage.address,
        num_slots=stage.num_slots,
        boxes_address=boxes.address,
        num_boxes=len(boxes.words),
    )
