"""Pages whose KV is computed, known by their hashes, shared by requests, kept until room is needed.

Pure; knows hashes, page ids and who holds what, neither tokens nor requests nor tensors.

A request *holds* the entries of its first pages, one after the other from the root: its chain. An
entry that somebody holds cannot be evicted; nor can those before it, since whoever holds a page
holds all before it. Entries that nobody holds are *idle*, in the order in which they were let go,
each chain from its last page to its first. So in that order a page comes after all that build on
it, and the least recently used is always a leaf: evicting from the front never makes a hole. (What
vLLM's free queue does with blocks in reverse order; here it is an invariant, and checked.)

Two requests may compute the same page at the same time. The entry has the first one's; the second
keeps its own as a *spare* and holds the entry as well, so that what it publishes behind it has a
parent. When all who use the entry's page have let go, a spare takes its place: a page is never kept
twice for one request, and a request that is alone can always grow to what it was promised.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set

from common.kv_cache.hashing import key
from common.plan import CacheChanged


class PrefixLeak(Exception):
    """Entries, their holders and their pages do not add up: a bug."""


class CachedPage:
    """An entry. `is_known` ends when the cache forgets it; who holds it then goes on using it."""

    __slots__ = ("hash", "is_known", "page", "parent", "refs", "spares")

    def __init__(self, page_hash: bytes, page: int, parent: "CachedPage | None") -> None:
        self.hash = page_hash
        self.page = page
        self.parent = parent
        self.refs = 1
        """Holders that use `page`."""
        self.spares: tuple[int, ...] = ()
        """Pages of other holders, with the same content. Empty where `refs` is 0."""
        self.is_known = True


class PrefixCache:
    """hash -> page, least recently used leaves first out."""

    def __init__(self, free: Callable[[Iterable[int]], None]) -> None:
        """`free` is given the pages that nobody holds and the cache does not know any more."""
        self._free = free
        self._entries: dict[bytes, CachedPage] = {}
        self._idle: OrderedDict[CachedPage, None] = OrderedDict()
        self._changes: dict[int, bool] = {}
        """Key -> whether it was stored (else evicted), net, since `take_changes`."""
        self._cleared = False

    def __len__(self) -> int:
        """Pages it knows, held or not."""
        return len(self._entries)

    @property
    def num_idle(self) -> int:
        """Pages that could be evicted now."""
        return len(self._idle)

    # ------------------------------------------------------------ holding

    def match(self, hashes: Iterable[bytes]) -> list[CachedPage]:
        """The entries of the first hashes, as far as they are known. Changes nothing."""
        found = []
        for page_hash in hashes:
            entry = self._entries.get(page_hash)
            if entry is None:
                break
            found.append(entry)
        return found

    def hold(self, chain: Iterable[CachedPage]) -> None:
        """One more holder uses these pages."""
        for entry in chain:
            if entry.refs == 0:
                del self._idle[entry]
            entry.refs += 1

    def put(self, page_hash: bytes, page: int, parent: CachedPage | None) -> CachedPage:
        """A holder of `parent`, and of all before it, has computed `page`; it holds the result."""
        entry = self._entries.get(page_hash)
        if entry is None:
            entry = self._entries[page_hash] = CachedPage(page_hash, page, parent)
            self._note(page_hash, stored=True)
        elif entry.refs:
            entry.spares += (page,)
        else:
            del self._idle[entry]
            old, entry.page, entry.refs = entry.page, page, 1
            self._free((old,))
        return entry

    def let_go(self, chain: Sequence[CachedPage], pages: Sequence[int]) -> None:
        """A holder ends. `pages`: those it used, one for each entry of its chain."""
        for entry, page in zip(reversed(chain), reversed(pages), strict=True):
            if page != entry.page:
                entry.spares = _without(entry.spares, page)
                self._free((page,))
                continue
            entry.refs -= 1
            if entry.refs:
                continue
            if entry.spares:
                entry.page, entry.refs = entry.spares[0], 1
                entry.spares = entry.spares[1:]
                self._free((page,))
            elif entry.is_known:
                self._idle[entry] = None
            else:
                self._free((page,))

    # ------------------------------------------------------------ forgetting

    def evict(self, count: int) -> None:
        """Free the `count` least recently used idle pages; there must be so many."""
        for _ in range(count):
            entry, _ = self._idle.popitem(last=False)
            self._forget(entry)
            self._free((entry.page,))

    def clear(self) -> None:
        """Forget everything. What is held is freed when its holders let go."""
        for entry in self._entries.values():
            entry.is_known = False
        self._free([entry.page for entry in self._idle])
        self._cleared = self._cleared or bool(self._entries or self._changes)
        self._changes.clear()
        self._entries.clear()
        self._idle.clear()

    def forget(self, pages: Set[int]) -> int:
        """The content of these pages is doubtful: forget them and all that builds on them.

        Returns how many entries that were. In time linear in the cache: an entry is stored after
        its parent, so one look at each in that order is enough.
        """
        doubtful: set[CachedPage] = set()
        for entry in self._entries.values():
            touched = entry.page in pages or not pages.isdisjoint(entry.spares)
            if touched or entry.parent in doubtful:
                doubtful.add(entry)
        for entry in doubtful:
            self._forget(entry)
            if entry.refs == 0:
                del self._idle[entry]
                self._free((entry.page,))
        return len(doubtful)

    def _forget(self, entry: CachedPage) -> None:
        entry.is_known = False
        del self._entries[entry.hash]
        self._note(entry.hash, stored=False)

    # ------------------------------------------------------------ what has changed

    def _note(self, page_hash: bytes, *, stored: bool) -> None:
        """What is stored and evicted between two reports, or the other way round, is no news."""
        name = key(page_hash)
        if self._changes.pop(name, stored) is stored:
            self._changes[name] = stored

    def take_changes(self) -> CacheChanged | None:
        """What has changed since the last call; None if nothing has."""
        if not self._changes and not self._cleared:
            return None
        evicted = tuple(name for name, stored in self._changes.items() if not stored)
        stored = tuple(name for name, stored in self._changes.items() if stored)
        changed = CacheChanged(evicted, stored, self._cleared)
        self._changes, self._cleared = {}, False
        return changed

    # ------------------------------------------------------------ invariants

    def check(self, holders: Iterable[tuple[Sequence[CachedPage], Sequence[int]]]) -> list[int]:
        """Raise `PrefixLeak` unless references, spares and order are right.

        `holders`: chain and pages of each. Returns the pages of entries, idle and held: each is in
        the pool's eyes one that somebody has.
        """
        refs: Counter[CachedPage] = Counter()
        spares: dict[CachedPage, list[int]] = {}
        held: set[CachedPage] = set()
        for chain, pages in holders:
            before: CachedPage | None = None
            for entry, page in zip(chain, pages, strict=True):
                if entry.parent is not before:
                    raise PrefixLeak(f"page {page} is held and the page before it is not")
                held.add(entry)
                if page == entry.page:
                    refs[entry] += 1
                else:
                    spares.setdefault(entry, []).append(page)
                before = entry
        for entry in held:
            if entry.refs != refs[entry] or sorted(entry.spares) != sorted(spares.get(entry, [])):
                raise PrefixLeak(f"page {entry.page} has holders and counts that differ")
        self._check_entries(held)
        return [entry.page for entry in {*self._entries.values(), *held}]

    def _check_entries(self, held: Set[CachedPage]) -> None:
        place = {entry: number for number, entry in enumerate(self._idle)}
        for page_hash, entry in self._entries.items():
            if entry.hash != page_hash or not entry.is_known:
                raise PrefixLeak(f"page {entry.page} is known under another name")
            if (entry in place) is (entry in held) or (entry in place) is bool(entry.refs):
                raise PrefixLeak(f"page {entry.page} is both idle and held, or neither")
            parent = entry.parent
            if parent is None:
                continue
            if self._entries.get(parent.hash) is not parent:
                raise PrefixLeak(f"page {entry.page} builds on a page that is not known")
            if parent in place and not (entry in place and place[entry] < place[parent]):
                raise PrefixLeak(f"page {parent.page} would be evicted before what builds on it")
        if not place.keys() <= set(self._entries.values()):
            raise PrefixLeak("an idle page is not known")


def _without(pages: tuple[int, ...], page: int) -> tuple[int, ...]:
    """Raises ValueError if it is not among them."""
    index = pages.index(page)
    return pages[:index] + pages[index + 1 :]
