"""Writes to one peer, where pages go through host memory here, or there, or on both sides.

Each `advance` moves every piece on as far as it can go without waiting (`transfer.delivery`). What
a peer that stages has to say stands in its boxes and is read there, in one look for all pieces.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.messages import Incarnation, PeerMemory
from common.plan import Write, WriteDone, WriteFailed
from transfer.boxes import (
    DONE,
    FAILED,
    LOOK_BOXES,
    TAG_BITS,
    box_numbers,
    slot_of,
    state_of,
    tag_of,
)
from transfer.courier import at_once
from transfer.delivery import Delivery, Phase, Piece, cut
from transfer.handshake import heads_of, write_problem
from transfer.poster import Look, Poster, describe
from transfer.slots import Direction, Slots
from transfer.stage import PageStage
from transfer.staging_notes import Ask, Brought, Withdraw, encode

PIECE_PAGES = 32
"""At most; while one piece is sent the next is copied."""
OPEN_PIECES = 8
"""Of one peer, where slots are no bound."""
LOOK_EVERY_S = 0.001
ASK_AGAIN_S = 1.0
"""A question may have found the peer's queue full."""
SETTLE_S = 1.0
"""Between a peer's loss and the end of writes that reached its slots: what is there may still be
copied into its pages."""
PIECE = -1
"""The chunk number of a piece, whose room is its tag."""

UNKNOWN = "the peer is unknown"
LEASE_OVER = "the peer's lease is over"

Handle = TypeVar("Handle")


@dataclass(slots=True)
class Sender(Generic[Handle]):
    """What the peers of one node share. `memory` is the node's own pool."""

    poster: Poster[Handle]
    memory: PeerMemory
    clock: Callable[[], float]
    stage: PageStage | None
    slots: Slots | None
    """Of `stage`, if there is one."""
    pieces: dict[int, tuple["StagedPeer[Handle]", Piece]] = field(default_factory=dict)
    """By tag, those that are open."""
    tag: int = field(default_factory=lambda: random.getrandbits(TAG_BITS))

    def next_tag(self) -> int:
        """In the range of tags, never 0."""
        self.tag = self.tag % ((1 << TAG_BITS) - 1) + 1
        return self.tag


class StagedPeer(Generic[Handle]):
    """Not thread-safe. `memory` is the peer's pool."""

    def __init__(self, name: Incarnation, memory: PeerMemory, sender: Sender[Handle]) -> None:
        self.name = name
        self.memory = memory
        self.deliveries: list[Delivery] = []
        """Begun and not ended, in order. Only the newest may have parts that have not begun."""
        self.lost = False
        """Its connection broke."""
        self._sender = sender
        self._is_looking = False
        self._looked_at = 0.0

    # ------------------------------------------------------------ writes

    def begin(self, write: Write) -> WriteFailed | bool:
        """Begin a write: how it failed, or whether it began; it has to wait if it did not."""
        problem = UNKNOWN if self.lost else self._problem(write)
        if problem is not None:
            return WriteFailed(write.room, write.chunk, problem)
        if any(delivery.unbegun for delivery in self.deliveries):
            return False
        delivery = Delivery(write, self._sender.clock(), cut(write, self._pages_a_piece()))
        if not self._begin_piece(delivery):
            return False
        self.deliveries.append(delivery)
        return True

    def _problem(self, write: Write) -> str | None:
        pages = self._sender.memory.num_pages, self.memory.num_pages
        problem = write_problem(write.source_pages, write.target_pages, *pages)
        return problem or (None if self._may_post() else LEASE_OVER)

    def _may_post(self) -> bool:
        return self._sender.poster.may_post(self.name)

    def _pages_a_piece(self) -> int:
        rings = []
        if self._sender.slots is not None:
            rings.append(self._sender.slots.count)
        if self.memory.stage is not None:
            rings.append(self.memory.stage.num_slots)
        return max(1, min(PIECE_PAGES, *(count // 8 for count in rings)))

    def advance(self) -> list[WriteDone | WriteFailed]:
        """Move everything on; the ends that came of it."""
        for piece in self._pieces():
            if piece.phase is Phase.PREPARING:
                self._prepare(piece)
        for delivery in self.deliveries:
            if delivery.unbegun and not self._may_post():
                delivery.fail(LEASE_OVER)
            while delivery.unbegun and self._begin_piece(delivery):
                pass
        self._look()
        now = self._sender.clock()
        over = [each for each in self.deliveries if each.is_over and now >= each.settled_at]
        self.deliveries = [each for each in self.deliveries if each not in over]
        return [delivery.end(now) for delivery in over]

    def _pieces(self) -> Iterable[Piece]:
        for delivery in self.deliveries:
            yield from list(delivery.open)

    def stop(self, reason: str) -> None:
        """Post nothing any more."""
        for delivery in self.deliveries:
            if not delivery.is_posted:
                delivery.fail(reason)

    def lose(self, error: str) -> None:
        """The connection broke: what is posted ends by itself."""
        self.lost = True
        for delivery in self.deliveries:
            delivery.fail(error)
            if self.memory.stage is not None:
                delivery.settled_at = self._sender.clock() + SETTLE_S
        for piece in self._pieces():
            if piece.phase is Phase.CONFIRMING:
                self._finish(piece)

    # ------------------------------------------------------------ a piece until it is posted

    def _begin_piece(self, delivery: Delivery) -> bool:
        """Begin the delivery's next part; False if it has to wait."""
        sources, targets = delivery.unbegun[0]
        if sum(len(each.open) for each in self.deliveries) >= OPEN_PIECES:
            return False
        slots = self._take_slots(len(sources))
        if slots is None:
            return False
        delivery.unbegun.popleft()
        tag, is_last = self._sender.next_tag(), not delivery.unbegun
        piece = Piece(tag, delivery, sources, targets, is_last, slots=slots)
        delivery.open.append(piece)
        self._sender.pieces[tag] = self, piece
        if self._sender.stage is not None:
            try:
                piece.fetched = self._sender.stage.fetch(sources, slots)
            except Exception as error:
                delivery.fail(f"could not copy to the stage: {describe(error)}")
        if self.memory.stage is not None and delivery.error is None:
            piece.boxes = self._boxes_of(targets)
            self._ask(piece)
        return True

    def _take_slots(self, count: int) -> tuple[int, ...] | None:
        """Own slots for a piece, none where none are needed; None if it has to wait for them."""
        slots = self._sender.slots
        if slots is None:
            return ()
        held = sum(delivery.num_slots for delivery in self.deliveries)
        if held and held + count > slots.limit // 2:
            return None
        return slots.take(Direction.OUTGOING, count)

    def _boxes_of(self, pages: Sequence[int]) -> tuple[int, ...]:
        heads = heads_of(self._sender.memory).common(heads_of(self.memory))
        assert heads is not None, "no peer is added that has none of them"
        first = heads.first - self.memory.first_head
        return box_numbers(pages, self.memory.num_heads, first)

    def _ask(self, piece: Piece) -> None:
        own = self._sender.memory
        ask = Ask(piece.tag, piece.target_pages, own.first_head, own.num_heads)
        self._sender.poster.notify(self.name, encode(ask))
        piece.asked_at = self._sender.clock()

    def _prepare(self, piece: Piece) -> None:
        """Post a piece as soon as all it needs is there; the poster reads the lease once more."""
        delivery = piece.delivery
        is_fetched = self._is_fetched(piece)
        if delivery.error is None and not self._may_post():
            delivery.fail(LEASE_OVER)
        if delivery.error is not None:
            if is_fetched:
                self._withdraw(piece)
                self._finish(piece)
        elif is_fetched and piece.may_go:
            self._post(piece)
        elif piece.wanted_boxes and not piece.known and self._may_ask_again(piece):
            self._ask(piece)

    def _may_ask_again(self, piece: Piece) -> bool:
        return self._sender.clock() - piece.asked_at >= ASK_AGAIN_S

    def _is_fetched(self, piece: Piece) -> bool:
        try:
            return piece.fetched()
        except Exception as error:
            piece.delivery.fail(f"could not copy to the stage: {describe(error)}")
            piece.fetched = at_once
            return True

    def _post(self, piece: Piece) -> None:
        notification = piece.delivery.write.notification if piece.is_last else b""
        if piece.boxes:
            notification = encode(Brought(piece.tag, piece.granted, notification))
        sources, targets = piece.slots or piece.source_pages, piece.granted or piece.target_pages
        piece.phase = Phase.POSTED
        write = Write(piece.tag, PIECE, self.name, sources, targets, notification)
        self._sender.poster.handle(write)

    # ------------------------------------------------------------ a piece from then on

    def on_ended(self, piece: Piece, event: WriteDone | WriteFailed) -> None:
        """What was posted has ended: own slots are read no more."""
        self._give_back(piece)
        if isinstance(event, WriteFailed):
            piece.delivery.fail(event.error)
            self._withdraw(piece)  # it may not even have been posted
            self._finish(piece)
            return
        piece.delivery.num_bytes += event.num_bytes
        if piece.boxes and not self.lost:
            piece.phase = Phase.CONFIRMING
        else:
            self._finish(piece)

    def _withdraw(self, piece: Piece) -> None:
        if piece.boxes:
            self._sender.poster.notify(self.name, encode(Withdraw(piece.tag)))

    def _finish(self, piece: Piece) -> None:
        self._give_back(piece)
        piece.delivery.open.remove(piece)
        del self._sender.pieces[piece.tag]

    def _give_back(self, piece: Piece) -> None:
        if self._sender.slots is not None:
            self._sender.slots.give(Direction.OUTGOING, piece.slots)
        piece.slots = ()

    # ------------------------------------------------------------ looking into boxes

    def _look(self) -> None:
        now = self._sender.clock()
        if self._is_looking or now - self._looked_at < LOOK_EVERY_S:
            return
        boxes: list[int] = []
        for piece in self._pieces():
            if len(boxes) + len(piece.wanted_boxes) <= LOOK_BOXES:
                boxes += piece.wanted_boxes
        if boxes:
            self._looked_at = now
            self._is_looking = self._sender.poster.look(Look(self.name, tuple(boxes)))

    def on_look(self, look: Look, words: Sequence[int]) -> None:
        """What was read."""
        self._is_looking = False
        seen = dict(zip(look.boxes, words, strict=True))
        for piece in self._pieces():
            wanted = piece.wanted_boxes
            if wanted and seen.keys() >= set(wanted):
                self._on_words(piece, [seen[box] for box in wanted])

    def _on_words(self, piece: Piece, words: Sequence[int]) -> None:
        if any(tag_of(word) != piece.tag for word in words):
            if piece.known:
                self._refused(piece, "its pages have a new owner")
            return
        piece.known = True
        states = [state_of(word) for word in words]
        if FAILED in states:
            self._refused(piece, "the peer could not take it in")
        elif piece.phase is Phase.PREPARING:
            slots = [slot_of(word) for word in words]
            if None not in slots:
                piece.granted = tuple(slot for slot in slots if slot is not None)
        elif states == [DONE]:
            self._finish(piece)

    def _refused(self, piece: Piece, error: str) -> None:
        """The peer's word: nothing of the piece will touch its pages."""
        piece.delivery.fail(error)
        if piece.phase is Phase.CONFIRMING:
            self._finish(piece)
