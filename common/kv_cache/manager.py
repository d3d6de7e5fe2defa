"""Pages of requests: allocation over `PagePool` and `PrefixCache`, and the quarantine.

    free ──admit, grow──▶ a request's own ──publish──▶ cached, held ◀──admit (a hit)──┐
     ▲ ▲                     │      │                       │                         │
     │ └──────release────────┘   quarantine              release ──▶ cached, idle ────┘
     └────────────────────────────────┴──────────────────────────────evict┘

A page is in exactly one of these places. What may be given to a request now is what is free and
what is cached and idle. Only pages whose every position's KV has been computed are published; until
then, and while a transfer may still touch it, a page is one request's own.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

from common.kv_cache import hashing
from common.kv_cache.hashing import PageHashes
from common.kv_cache.page_pool import PagePool
from common.kv_cache.prefix_cache import CachedPage, PrefixCache
from common.messages import Incarnation, Room
from common.plan import CacheChanged
from common.request import Req
from common.settings import SchedulerSettings

RootOf = Callable[[str], bytes]
"""Adapter digest -> where the page hashes of its requests begin: `hashing.root` of this node."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Pages of an ended room that a lost peer might still write into."""

    peer: Incarnation
    pages: tuple[int, ...]


class KVCacheManager:
    """Owns every page that is not free: through a request, in the prefix cache, in quarantine."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        root_of: RootOf | None = None,
        counters: "Counter[str] | None" = None,
    ) -> None:
        """Without `root_of` nothing is ever cached. `counters`: where hits and evictions go."""
        self.page_size = page_size
        self._counters: Counter[str] = Counter() if counters is None else counters
        self._pool = PagePool(num_pages)
        self._cache = PrefixCache(self._pool.free)
        self._root_of = root_of
        self._quarantine: dict[Room, Quarantined] = {}

    @classmethod
    def of_node(cls, settings: SchedulerSettings, counters: "Counter[str]") -> "KVCacheManager":
        """That of the node with these settings; it caches unless they say no."""
        root = partial(hashing.root, settings.fingerprint, settings.weight_version)
        root_of = lru_cache(maxsize=1024)(root) if settings.prefix_cache else None
        return cls(settings.num_pages, settings.page_size, root_of, counters)

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        """Pages that a request may be given now, cached ones that nobody holds among them."""
        return self._pool.num_free + self._cache.num_idle

    @property
    def num_cached(self) -> int:
        """Pages that the prefix cache knows, held or not."""
        return len(self._cache)

    @property
    def num_quarantined(self) -> int:
        return sum(len(entry.pages) for entry in self._quarantine.values())

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    # ------------------------------------------------------------ requests

    def pages_to_admit(self, req: Req, num_tokens: int, *, reuse: bool = True) -> int:
        """By how many pages `admit` would lower `num_free`: those that others hold cost nothing."""
        held = sum(1 for entry in self._match(req) if entry.refs) if reuse else 0
        return self.pages_for(num_tokens) - held

    def admit(self, req: Req, num_tokens: int, *, reuse: bool = True) -> int | None:
        """Give `req`, which has no pages, room for `num_tokens` positions, or change nothing.

        Its first pages are cached ones, as far as they go (unless not to `reuse` any), and the rest
        is its own. Returns how many tokens' KV is there already, or None if the pool is too empty.
        """
        assert not req.pages, f"{req.rid} has pages already"
        chain = self._match(req) if reuse else []
        idle = sum(1 for entry in chain if not entry.refs)
        need = self.pages_for(num_tokens) - len(chain)
        if need + idle > self.num_free:
            return None
        self._cache.hold(chain)
        own = self._allocate(need)
        assert own is not None
        req.chain = chain
        req.pages = [entry.page for entry in chain] + own
        num_hit = len(chain) * self.page_size
        if self._root_of is not None:
            self._counters["cache_queried_tokens"] += req.num_tokens
            self._counters["cache_hit_tokens"] += num_hit
        return num_hit

    def extend_hit(self, req: Req) -> int:
        """Look again, before anything of `req` is computed: pages cached since then replace its
        own. Returns how many tokens' KV is there by now."""
        first = len(req.chain)
        intact = not first or req.chain[-1].is_known
        more = self._match(req)[first:] if intact else []
        self._cache.hold(more)
        self._pool.free(req.pages[first : first + len(more)])
        req.pages[first : first + len(more)] = [entry.page for entry in more]
        req.chain += more
        self._counters["cache_hit_tokens"] += len(more) * self.page_size
        return len(req.chain) * self.page_size

    def grow(self, req: Req, num_tokens: int) -> list[int] | None:
        """Give `req` room for `num_tokens` positions in one step, or change nothing.

        Returns the pages added (none if it had enough), or None if the pool is too empty.
        """
        added = self._allocate(max(0, self.pages_for(num_tokens) - len(req.pages)))
        if added is not None:
            req.pages += added
        return added

    def publish(self, req: Req, num_computed: int) -> None:
        """The KV of the first `num_computed` positions is in the pages of `req`, and no transfer
        will write there any more: others may use its full pages from now on."""
        chain, full = req.chain, num_computed // self.page_size
        if self._root_of is None or full <= len(chain):
            return
        hashes = self._hashes(req, full)
        parent = chain[-1] if chain else None
        if parent is not None and not parent.is_known:
            return
        for index in range(len(chain), full):
            parent = self._cache.put(hashes[index], req.pages[index], parent)
            chain.append(parent)

    def release(self, req: Req) -> None:
        """Take all of a request's pages back; no transfer may touch them any more."""
        self._pool.free(req.pages[len(req.chain) :])
        self._cache.let_go(req.chain, req.pages[: len(req.chain)])
        req.pages, req.chain = [], []

    def release_hit(self, req: Req) -> None:
        """Take back only the cached pages that it was admitted with; the rest waits for a transfer.

        Only for a request that has published nothing.
        """
        count = len(req.chain)
        self._cache.let_go(req.chain, req.pages[:count])
        req.pages, req.chain = req.pages[count:], []

    def _match(self, req: Req) -> list[CachedPage]:
        """Never with the page of its last known token: that is always computed, or sent."""
        if self._root_of is None:
            return []
        return self._cache.match(self._hashes(req, (req.num_tokens - 1) // self.page_size))

    def _hashes(self, req: Req, num_pages: int) -> list[bytes]:
        if req.hashes is None:
            assert self._root_of is not None
            req.hashes = PageHashes(self._root_of(req.adapter_digest), self.page_size)
        known = req.hashes.num_known
        if known < num_pages:
            size = self.page_size
            req.hashes.extend(req.tokens(known * size, num_pages * size))
        return req.hashes.first(num_pages)

    def _allocate(self, count: int) -> list[int] | None:
        """Free pages, then cached ones that nobody holds, then those freed without proof."""
        if count > self.num_free:
            return None
        missing = count - self._pool.num_preferred
        if missing > 0:
            evicted = min(missing, self._cache.num_idle)
            self._cache.evict(evicted)
            self._counters["cache_evictions"] += evicted
        return self._pool.allocate(count)

    # ------------------------------------------------------------ the cache

    def flush(self, reqs: Iterable[Req]) -> str | None:
        """Empty the prefix cache, unless one of these requests holds pages; then say so."""
        holders = sum(1 for req in reqs if req.pages)
        if holders or self._quarantine:
            return f"{holders} requests hold pages, {self.num_quarantined} are quarantined"
        self.clear_cache()
        return None

    def clear_cache(self) -> None:
        """Nothing computed before this is used for a request that comes after it."""
        self._cache.clear()

    def forget_pages(self, pages: Iterable[int]) -> int:
        """Their content is doubtful; returns how many cached pages were forgotten with them."""
        return self._cache.forget(frozenset(pages))

    def take_changes(self) -> CacheChanged | None:
        """What the prefix cache has learnt and forgotten since the last call."""
        return self._cache.take_changes()

    # ------------------------------------------------------------ quarantine

    def quarantine(self, req: Req, peer: Incarnation) -> None:
        """Set its own pages aside: `peer` is lost and could still write into them."""
        self.release_hit(req)
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
        """Every page is free, cached, one request's or in quarantine, and only one of these."""
        reqs = tuple(reqs)
        held = self._cache.check((req.chain, req.pages[: len(req.chain)]) for req in reqs)
        for req in reqs:
            first_own = len(req.chain)
            held += [page for page, e in zip(req.pages, req.chain, strict=False) if page != e.page]
            held += req.pages[first_own:]
        held += [page for entry in self._quarantine.values() for page in entry.pages]
        self._pool.check(held)
