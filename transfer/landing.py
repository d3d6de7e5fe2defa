"""The receiving half of staging: slots for what peers want to send, then from slots into pages.

    Ask ──▶ waiting ──(slots)──▶ granted ──Brought──▶ copying ──▶ DONE in the boxes, `Notified`

Peers write into slots of this node's host memory, never into its pages. They find in `boxes` which
slots are theirs and when a piece is in its pages; only then may they say that a write is done, as
that word gives the pages away. Nothing is ever sent to a peer from here.

**Slots of the dead.** A sender that dies between Ask and Brought leaves its slots granted. They are
taken back when the same page is asked for again: the page has a new owner, and that is decided only
when the old one can write no more (`decode_node/quarantine.py`); else after `GRANT_S`. Should bytes
of such a sender come all the same, they may have gone into slots of others: those then fail.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.plan import Notified
from transfer.boxes import DONE, FAILED, TAG_BITS, Boxes, box_numbers
from transfer.courier import Ready
from transfer.head_ranges import HeadRange
from transfer.slots import Direction, Slots
from transfer.stage import PageStage
from transfer.staging_notes import Ask, Brought, Withdraw, decode

log = logging.getLogger(__name__)

GRANT_S = 600.0
"""As long as decode keeps the pages of a stopped peer if nobody says otherwise."""
MAX_WAITING = 4096
"""Pieces that wait for slots; a sender asks again for what was not taken in."""
MAX_WITHDRAWN = 1024
"""Remembered, as an Ask may come behind its Withdraw."""


@dataclass(slots=True)
class _Piece:
    tag: int
    pages: tuple[int, ...]
    heads: HeadRange
    """Of these pages; 0 is the first that they hold."""
    boxes: tuple[int, ...]
    slots: tuple[int, ...] = ()
    granted_at: float = 0.0
    spoilt: bool = False
    """A stray write may have hit its slots."""
    notification: bytes = b""
    copied: Ready | None = None


class Landing:
    """Not thread-safe. `heads`: those that this node's pages hold, in the model's numbering."""

    def __init__(
        self,
        stage: PageStage,
        slots: Slots,
        boxes: Boxes,
        num_pages: int,
        heads: HeadRange,
        clock: Callable[[], float],
    ) -> None:
        self._stage = stage
        self._slots = slots
        self._boxes = boxes
        self._num_pages = num_pages
        self._heads = heads
        self._clock = clock
        self._waiting: OrderedDict[int, _Piece] = OrderedDict()
        self._granted: OrderedDict[int, _Piece] = OrderedDict()
        """Those granted first in front."""
        self._copying: list[_Piece] = []
        self._owner: dict[int, _Piece] = {}
        """By box, the piece that waits for slots or has them."""
        self._withdrawn: OrderedDict[int, None] = OrderedDict()

    @property
    def num_open(self) -> int:
        """What is worth a look soon."""
        return len(self._waiting) + len(self._copying)

    def take(self, payload: bytes) -> None:
        """A notification that came."""
        match decode(payload):
            case Ask() as ask:
                self._on_ask(ask)
            case Brought(tag, slots, notification):
                self._on_brought(tag, slots, notification)
            case Withdraw(tag):
                self._on_withdrawn(tag)
            case None:
                log.warning("a notification of %d bytes that is no note of a stage", len(payload))

    def progress(self) -> list[Notified]:
        """One round; the notifications of writes that are in their pages now."""
        while self._granted:
            oldest = next(iter(self._granted.values()))
            if self._clock() - oldest.granted_at < GRANT_S:
                break
            log.warning("%d slots were granted and not used", len(oldest.slots))
            self._fail(self._granted.pop(oldest.tag))
        landed = [self._land(piece) for piece in self._copying if self._is_copied(piece)]
        self._copying = [piece for piece in self._copying if piece.copied is not None]
        self._grant()
        return [Notified(notification) for notification in landed if notification]

    # ------------------------------------------------------------ what senders say

    def _on_ask(self, ask: Ask) -> None:
        heads = self._heads.common(HeadRange(ask.first_head, ask.num_heads))
        if heads is None or not self._is_sound(ask):
            log.warning("a piece of %d pages that has no place here", len(ask.pages))
            return
        if ask.tag in self._withdrawn or len(self._waiting) >= MAX_WAITING:
            return
        own = HeadRange(heads.first - self._heads.first, heads.count)
        boxes = box_numbers(ask.pages, self._heads.count, own.first)
        if self._boxes.tag(boxes[0]) == ask.tag:
            return  # asked again: the answer is there, or will be
        for box in boxes:
            self._retire(box)
        piece = _Piece(ask.tag, ask.pages, own, boxes)
        self._boxes.put(boxes, ask.tag, [0] * len(boxes))
        self._waiting[ask.tag] = piece
        self._owner.update(dict.fromkeys(boxes, piece))
        self._grant()

    def _is_sound(self, ask: Ask) -> bool:
        pages = ask.pages
        return (
            0 < ask.tag < 1 << TAG_BITS
            and 0 < len(set(pages)) == len(pages) <= self._slots.limit
            and min(pages) >= 0
            and max(pages) < self._num_pages
        )

    def _on_brought(self, tag: int, slots: tuple[int, ...], notification: bytes) -> None:
        piece = self._granted.pop(tag, None)
        if piece is None or piece.slots != slots:
            log.warning("a write into %d slots came late", len(slots))
            self._spoil(slots)
            if piece is not None:
                self._fail(piece)
            return
        if piece.spoilt:
            self._fail(piece)
            return
        piece.notification = notification
        try:
            heads = piece.heads
            piece.copied = self._stage.put(slots, piece.pages, heads.first, heads.count)
        except Exception:
            log.exception("could not copy from the stage")
            self._fail(piece)
            return
        self._copying.append(piece)

    def _on_withdrawn(self, tag: int) -> None:
        piece = self._waiting.pop(tag, None) or self._granted.pop(tag, None)
        if piece is not None:
            self._fail(piece)
        self._withdrawn[tag] = None
        if len(self._withdrawn) > MAX_WITHDRAWN:
            self._withdrawn.popitem(last=False)

    # ------------------------------------------------------------ slots

    def _grant(self) -> None:
        """In the order of asking, all slots of a piece at once."""
        while self._waiting:
            piece = next(iter(self._waiting.values()))
            slots = self._slots.take(Direction.INCOMING, len(piece.pages))
            if slots is None:
                return
            del self._waiting[piece.tag]
            piece.slots, piece.granted_at = slots, self._clock()
            self._granted[piece.tag] = piece
            self._boxes.put(piece.boxes, piece.tag, [slot + 1 for slot in slots])

    def _retire(self, box: int) -> None:
        """The box's page has a new owner: its former one writes no more."""
        piece = self._owner.get(box)
        if piece is not None and piece.copied is None:
            self._waiting.pop(piece.tag, None)
            self._granted.pop(piece.tag, None)
            self._fail(piece)

    def _spoil(self, slots: Sequence[int]) -> None:
        """Bytes came that nobody waits for: whoever has these slots now may have been hit."""
        for piece in self._granted.values():
            if not set(slots).isdisjoint(piece.slots):
                piece.spoilt = True

    # ------------------------------------------------------------ ends

    def _is_copied(self, piece: _Piece) -> bool:
        """Whether its copy is over; `spoilt` says that it failed."""
        assert piece.copied is not None
        try:
            return piece.copied()
        except Exception:
            log.exception("a copy from the stage failed")
            piece.spoilt = True
            return True

    def _land(self, piece: _Piece) -> bytes:
        """What is to be notified."""
        piece.copied = None
        if piece.spoilt:
            self._fail(piece)
            return b""
        self._let_go(piece, DONE)
        return piece.notification

    def _fail(self, piece: _Piece) -> None:
        self._let_go(piece, FAILED)

    def _let_go(self, piece: _Piece, state: int) -> None:
        self._boxes.end(piece.boxes, piece.tag, state)
        self._slots.give(Direction.INCOMING, piece.slots)
        for box in piece.boxes:
            if self._owner.get(box) is piece:
                del self._owner[box]
