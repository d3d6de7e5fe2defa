"""Destinations whose request has not come yet: the twins of a room arrive in either order. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from common.messages import Destination, Incarnation, Room


@dataclass(frozen=True, slots=True)
class EarlyDestination:
    peer: Incarnation
    destination: Destination
    deadline: float


class EarlyDestinations:
    """Room -> its destination, until its request comes, its peer is lost, or its time is over."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: dict[Room, EarlyDestination] = {}

    def __contains__(self, room: Room) -> bool:
        return room in self._waiting

    @property
    def rooms(self) -> Collection[Room]:
        return self._waiting.keys()

    def keep(self, peer: Incarnation, destination: Destination, now: float) -> None:
        """The first for a room counts; `now` is this node's clock."""
        early = EarlyDestination(peer, destination, now + self._timeout_s)
        self._waiting.setdefault(destination.room, early)

    def pop(self, room: Room) -> EarlyDestination | None:
        return self._waiting.pop(room, None)

    def forget(self, peer: Incarnation) -> None:
        """The peer is lost, and with it the pages that it named."""
        self._waiting = {r: early for r, early in self._waiting.items() if early.peer != peer}

    def take_expired(self, now: float) -> list[EarlyDestination]:
        """Those whose request never came; they are not kept any longer."""
        expired = [early for early in self._waiting.values() if early.deadline <= now]
        for early in expired:
            del self._waiting[early.destination.room]
        return expired
