"""Rooms that have ended, remembered for a while so that late messages find the truth."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from common.messages import FailureKind, Room


class Ending(Enum):
    DONE = auto()
    """Every write landed, or the room never needed one."""
    FIRST_TOKEN = auto()
    """The first token ended the request: decode has nothing to wait for."""
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Tombstone:
    ending: Ending
    landed: frozenset[int] = frozenset()
    """Chunks whose bytes are known to have arrived; their late notifications are harmless."""
    kind: FailureKind = FailureKind.TRANSFER
    message: str = ""


class Tombstones:
    """Room -> tombstone, bounded in time and number; the oldest go first."""

    def __init__(self, ttl_s: float, max_rooms: int = 200_000) -> None:
        self._ttl_s = ttl_s
        self._max_rooms = max_rooms
        self._stones: OrderedDict[Room, tuple[float, Tombstone]] = OrderedDict()

    def add(self, room: Room, stone: Tombstone, now: float) -> None:
        self._stones[room] = (now + self._ttl_s, stone)
        self._stones.move_to_end(room)
        if len(self._stones) > self._max_rooms:
            self._stones.popitem(last=False)

    def get(self, room: Room) -> Tombstone | None:
        entry = self._stones.get(room)
        return None if entry is None else entry[1]

    def with_landed(self, room: Room, landed: Iterable[int]) -> None:
        """Chunks of an ended room turned out to have landed before its end."""
        entry = self._stones.get(room)
        if entry is not None:
            expires, old = entry
            merged = Tombstone(old.ending, old.landed | frozenset(landed), old.kind, old.message)
            self._stones[room] = (expires, merged)

    def expire(self, now: float) -> None:
        while self._stones:
            room, (expires, _) = next(iter(self._stones.items()))
            if expires > now:
                return
            del self._stones[room]

    def __contains__(self, room: Room) -> bool:
        return room in self._stones
