"""Pages of requests: request-aware allocation over a `PagePool`, and the quarantine."""

from collections.abc import Iterable
from dataclasses import dataclass

from common.kv_cache.page_pool import PagePool
from common.messages import Incarnation, Room
from common.request import Req


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Pages of an ended room that a lost peer might still write into."""

    peer: Incarnation
    pages: tuple[int, ...]


class KVCacheManager:
    """Owns every page that is not free: through a request, or in quarantine."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._pool = PagePool(num_pages)
        self._quarantine: dict[Room, Quarantined] = {}

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_quarantined(self) -> int:
        return sum(len(entry.pages) for entry in self._quarantine.values())

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def grow(self, req: Req, num_tokens: int) -> list[int] | None:
        """Give `req` room for `num_tokens` positions in one step, or change nothing.

        Returns the pages added (none if it had enough), or None if the pool is too empty.
        """
        added = self._pool.allocate(max(0, self.pages_for(num_tokens) - len(req.pages)))
        if added is not None:
            req.pages += added
        return added

    def release(self, req: Req) -> None:
        """Take all of a request's pages back; no transfer may touch them any more."""
        self._pool.free(req.pages)
        req.pages = []

    def quarantine(self, req: Req, peer: Incarnation) -> None:
        """Set the pages aside: `peer` is lost and could still write into them."""
        if req.pages:
            self._quarantine[req.room] = Quarantined(peer, tuple(req.pages))
            req.pages = []

    def in_quarantine(self, room: Room) -> bool:
        return room in self._quarantine

    def quarantined_rooms(self, peer: Incarnation) -> list[Room]:
        return [room for room, entry in self._quarantine.items() if entry.peer == peer]

    def quarantined_peers(self) -> set[Incarnation]:
        return {entry.peer for entry in self._quarantine.values()}

    def end_quarantine(self, room: Room, peer: Incarnation) -> bool:
        """`peer` says that it writes no more; whether that brought pages home."""
        entry = self._quarantine.get(room)
        if entry is None or entry.peer != peer:
            return False
        self._pool.free(self._quarantine.pop(room).pages)
        return True

    def free_quarantine(self, peer: Incarnation, *, last: bool) -> int:
        """Free all that was set aside because of `peer`; returns the number of rooms.

        `last`: without proof that nothing writes into them, so they are given away last.
        """
        rooms = self.quarantined_rooms(peer)
        for room in rooms:
            self._pool.free(self._quarantine.pop(room).pages, last=last)
        return len(rooms)

    def check(self, reqs: Iterable[Req]) -> None:
        """Every page is free, a request's, or in quarantine, and in exactly one of these."""
        held = [page for req in reqs for page in req.pages]
        held += [page for entry in self._quarantine.values() for page in entry.pages]
        self._pool.check(held)
