"""Notifications of writes that come in several pieces, from rank to rank. Pure.

Each piece brings the whole notification, which of how many pieces it is, and whose it is. Pieces of
equal notifications of one source belong together: a notification names its room and chunk, so no
two writes have equal ones. Anybody who reaches the data plane may send such bytes; what they can do
is bounded here, and no piece of another's notification is completed by them.
"""

from collections import OrderedDict

import msgspec

from common.messages import Incarnation
from common.plan import Notified, PieceLanded, PiecesDropped
from transfer.head_ranges import MAX_RANKS

MARK = b"\xc1"
"""First byte of a piece. msgpack, which notifications are made of, never uses it."""
MAX_PIECES = MAX_RANKS**2
"""One for each pair of ranks. Of two nodes without replicas it is fewer than both have ranks."""
MAX_SOURCES = 256
MAX_BYTES_A_SOURCE = 16 << 20
ENTRY_BYTES = 256
"""What remembering a notification takes beside its bytes."""


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is sent with one piece of a write."""

    source: Incarnation
    index: int
    total: int
    notification: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Piece).decode


def wrapped(notification: bytes, index: int, total: int, source: Incarnation) -> bytes:
    """What piece `index` of `total` notifies its rank with; of one piece, the notification."""
    if total == 1:
        return notification
    return MARK + _encode(Piece(source, index, total, notification))


class Incomplete:
    """The notifications of one source of which pieces are missing, those begun first in front."""

    def __init__(self) -> None:
        self._arrived: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        """(notification, total) -> bit mask of its pieces that are here."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._arrived)

    def take(self, piece: Piece) -> Notified | PieceLanded | PiecesDropped:
        """What this piece means."""
        key, bit = (piece.notification, piece.total), 1 << piece.index
        before = self._arrived.get(key)
        if before is None:
            before = 0
            self._num_bytes += _size(key)
        elif before & bit:
            return PiecesDropped(1)
        if before | bit == (1 << piece.total) - 1:
            del self._arrived[key]
            self._num_bytes -= _size(key)
            return Notified(piece.notification)
        self._arrived[key] = before | bit
        return PieceLanded(piece.notification)

    def trim(self) -> int:
        """Forget the oldest beyond the bound; how many pieces that were."""
        dropped = 0
        while self._num_bytes > MAX_BYTES_A_SOURCE:
            key, mask = self._arrived.popitem(last=False)
            self._num_bytes -= _size(key)
            dropped += mask.bit_count()
        return dropped

    def pieces(self) -> int:
        return sum(mask.bit_count() for mask in self._arrived.values())


class PieceGatherer:
    """Puts notifications together from what several ranks were told; not thread-safe.

    What is kept of those that never complete is bounded for each source, and for all; it is
    forgotten when the source is.
    """

    def __init__(self) -> None:
        self._sources: OrderedDict[Incarnation, Incomplete] = OrderedDict()
        """Those heard longest ago first."""

    def take(self, payload: bytes) -> list[Notified | PieceLanded | PiecesDropped]:
        """What a notification of a rank means; what is no piece goes through as it is."""
        piece = read(payload)
        if piece is None:
            return [Notified(payload)]
        incomplete = self._sources.setdefault(piece.source, Incomplete())
        self._sources.move_to_end(piece.source)
        events: list[Notified | PieceLanded | PiecesDropped] = [incomplete.take(piece)]
        dropped = incomplete.trim()
        if not incomplete:
            del self._sources[piece.source]
        while len(self._sources) > MAX_SOURCES:
            dropped += self._sources.popitem(last=False)[1].pieces()
        return [*events, PiecesDropped(dropped)] if dropped else events

    def forget(self, source: Incarnation) -> list[PiecesDropped]:
        """A source is gone: nothing of it will be completed."""
        incomplete = self._sources.pop(source, None)
        return [] if incomplete is None else [PiecesDropped(incomplete.pieces())]


def read(payload: bytes) -> Piece | None:
    """A piece; None if these bytes are something else, or no piece that a node would send."""
    if payload[:1] != MARK:
        return None
    try:
        piece = _decode(memoryview(payload)[1:])
    except (msgspec.DecodeError, RecursionError):
        return None
    if not (2 <= piece.total <= MAX_PIECES and 0 <= piece.index < piece.total):
        return None
    return piece


def _size(key: tuple[bytes, int]) -> int:
    notification, total = key
    return len(notification) + total // 8 + ENTRY_BYTES
