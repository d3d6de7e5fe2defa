"""Which nodes have which pages cached: exactly what they said, neither more nor guessed. Pure.

    page key ──▶ bit mask of nodes            masks of equal value are one object
    A: 0b01      B: 0b11      C: 0b11

A prompt is matched by walking its keys and keeping the mask of those nodes that have had every page
so far: the cost goes with pages, not with nodes. A node that is lost, or whose word is not to be
believed any more, loses its bit at once; what it leaves behind is swept out bit by bit, and only
then is the bit given to another.

Updates are numbered. A jump means that one was lost: the node is forgotten and asked to say all
again. So is one that says what cannot be (more pages than it has, an eviction of what it never
stored, broken lengths), but after a pause that grows.

The number of pages is bounded: the oldest go, where a page is as young as its last match or news of
it. Whoever had such a page is remembered to have one more than is known, so that its eviction later
is no nonsense.
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice

from common.kv_cache.hashing import KEY_BYTES
from common.messages import CacheUpdate, Incarnation

WORK_KEYS = 4096
"""Keys that one call of `work` looks at: less than a millisecond."""
ANSWER_S = 10.0
"""How long a node may take to answer before it is asked again."""
PAUSES_S = (1.0, 300.0)
"""Shortest and longest wait before a node that spoke nonsense is asked again; it doubles."""
CROWDED = 7 / 8
"""From this share of the bound on, matched pages are made young again."""
FORGET_SHARE = 64
"""One part in so many is forgotten together, which costs little a page."""
MAX_INTERNED = 65_536
"""Masks that are kept one object each."""
FEW = 8
"""So many bits of a mask are read one by one, more of them as digits."""
_DIGITS = bytes.maketrans(b"01", b"\0\1")


@dataclass(slots=True, eq=False)
class _Holder:
    """One node as the index knows it."""

    node: Incarnation
    num_pages: int
    bit: int
    known: int = 0
    """Pages in the index that have its bit."""
    forgotten: int = 0
    """Pages that it has too, and that did not find room here."""
    next_seq: int | None = 1
    """None: it has lost our trust, and must begin anew."""
    epoch: int = 0
    """Grows when what waits to be taken in has become void."""
    waiting_bytes: int = 0
    ask_at: float = 0.0
    pause_s: float = 0.0
    troubled_at: float = 0.0


@dataclass(slots=True)
class _News:
    """An update that is being taken in."""

    holder: _Holder
    epoch: int
    reset: bool
    evicted: "array[int]"
    stored: "array[int]"
    num_bytes: int
    now: float


@dataclass(slots=True)
class _Sweep:
    """A pass over all pages that takes retired bits out."""

    bits: int
    keys: list[int] = field(default_factory=list)


class CacheIndex:
    """Use from one thread. `now` is any clock that does not go back."""

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._masks: dict[int, int] = {}
        self._interned: dict[int, int] = {}
        self._holders: dict[Incarnation, _Holder] = {}
        self._by_bit: list[_Holder] = []
        """Whose each bit is, or was last."""
        self._live = 0
        self._retired = 0
        """Bits of nobody that some page may still have."""
        self._sweep: _Sweep | None = None
        self._news: deque[_News] = deque()
        self.counters = Counter(
            dict.fromkeys(("updates", "gaps", "nonsense", "snapshots_wanted", "forgotten_pages"), 0)
        )

    def __len__(self) -> int:
        """Pages known, those that nobody has any more and that were not swept yet among them."""
        return len(self._masks)

    def pages_of(self, node: Incarnation) -> int:
        """Pages of a node that are known."""
        holder = self._holders.get(node)
        return 0 if holder is None else holder.known

    # ------------------------------------------------------------ nodes

    def join(self, node: Incarnation, num_pages: int) -> None:
        """A node was welcomed: its updates count from 1, and it has said nothing yet."""
        self.leave(node)
        self._holders[node] = self._take_bit(_Holder(node, num_pages, 0))

    def leave(self, node: Incarnation) -> None:
        """It is gone, or its link is."""
        holder = self._holders.pop(node, None)
        if holder is not None:
            self._void(holder)
            self._retire_bit(holder)

    def on_update(self, node: Incarnation, update: CacheUpdate, now: float) -> None:
        """Note what a node says; `work` takes it in."""
        holder = self._holders.get(node)
        if holder is None:
            return
        self.counters["updates"] += 1
        if update.reset:
            self._void(holder)
        elif holder.next_seq is None:
            self.counters["ignored_updates"] += 1
            return
        elif update.seq != holder.next_seq:
            self.counters["gaps"] += 1
            self._distrust(holder, now, patient=False)
            return
        num_bytes = len(update.evicted) + len(update.stored)
        holder.waiting_bytes += num_bytes
        broken = len(update.evicted) % KEY_BYTES or len(update.stored) % KEY_BYTES
        if broken or holder.waiting_bytes > 4 * KEY_BYTES * holder.num_pages:
            self._nonsense(holder, now)
            return
        holder.next_seq = update.seq + 1
        evicted, stored = _unpack(update.evicted), _unpack(update.stored)
        news = _News(holder, holder.epoch, update.reset, evicted, stored, num_bytes, now)
        self._news.append(news)

    def due(self, now: float) -> list[Incarnation]:
        """Nodes that are to be sent `ListCache` now."""
        late = [h for h in self._holders.values() if h.next_seq is None and h.ask_at <= now]
        for holder in late:
            holder.ask_at = now + max(ANSWER_S, holder.pause_s)
            self.counters["snapshots_wanted"] += 1
        return [holder.node for holder in late]

    # ------------------------------------------------------------ work, slice by slice

    def work(self, max_keys: int = WORK_KEYS) -> bool:
        """Take in news and sweep, about so many keys; whether there is more to do."""
        left = max_keys
        while self._news and left > 0:
            left -= 1 + self._take_in(self._news[0], left)
        if left > 0:
            self._sweep_out(left)
        return bool(self._news or self._retired)

    def _take_in(self, news: _News, most: int) -> int:
        """Some of an update; returns how many keys that were."""
        holder = news.holder
        if news.epoch != holder.epoch:
            self._news.popleft()
            return 0
        if news.reset:
            news.reset = False
            self._retire_bit(holder)
            self._take_bit(holder)
        evicted, stored = news.evicted[:most], news.stored[: max(0, most - len(news.evicted))]
        del news.evicted[: len(evicted)]
        del news.stored[: len(stored)]
        credible = self._evict(holder, evicted) and self._store(holder, stored)
        if not credible:
            self._nonsense(holder, news.now)
        if not news.evicted and not news.stored:
            self._news.popleft()
            holder.waiting_bytes -= news.num_bytes if credible else 0
        return len(evicted) + len(stored)

    def _store(self, holder: _Holder, keys: "array[int]") -> bool:
        """False: it would have more pages than it has."""
        masks, interned, bit, live = self._masks, self._interned, holder.bit, self._live
        new = 0
        for key in keys:
            mask = masks.get(key)
            if mask is None:
                masks[key] = bit
                new += 1
            elif not mask & bit:
                mask = mask & live | bit
                masks[key] = interned.setdefault(mask, mask)
                new += 1
        holder.known += new
        if len(masks) > self._max_pages:
            self._forget_oldest()
        if len(interned) > MAX_INTERNED:
            interned.clear()
        return holder.known + holder.forgotten <= holder.num_pages

    def _evict(self, holder: _Holder, keys: "array[int]") -> bool:
        """False: it never had one of them."""
        masks, interned, bit = self._masks, self._interned, holder.bit
        others = self._live & ~bit
        gone = 0
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & bit:
                continue
            gone += 1
            mask &= others
            if mask:
                masks[key] = interned.setdefault(mask, mask)
            else:
                del masks[key]
        holder.known -= gone
        holder.forgotten -= len(keys) - gone
        return holder.forgotten >= 0

    def _forget_oldest(self) -> None:
        masks = self._masks
        excess = len(masks) - self._max_pages + self._max_pages // FORGET_SHARE
        for key in list(islice(masks, excess)):
            for holder in self._holders_in(masks.pop(key) & self._live):
                holder.known -= 1
                holder.forgotten += 1
            self.counters["forgotten_pages"] += 1

    # ------------------------------------------------------------ trust

    def _nonsense(self, holder: _Holder, now: float) -> None:
        self.counters["nonsense"] += 1
        self._distrust(holder, now, patient=True)

    def _distrust(self, holder: _Holder, now: float, *, patient: bool) -> None:
        """Forget what it said, and have it asked anew: at once, or after a pause.

        Trouble soon after trouble doubles the pause, whatever it is.
        """
        shortest, longest = PAUSES_S
        calm_s = now - holder.troubled_at
        if holder.pause_s and calm_s < ANSWER_S + 2 * holder.pause_s:
            holder.pause_s = min(longest, 2 * holder.pause_s)
            holder.ask_at = now + holder.pause_s
        else:
            holder.pause_s = shortest
            holder.ask_at = now + (shortest if patient else 0.0)
        holder.troubled_at = now
        holder.next_seq = None
        self._void(holder)
        self._retire_bit(holder)
        self._take_bit(holder)

    @staticmethod
    def _void(holder: _Holder) -> None:
        """What it said and was not taken in is worth nothing now."""
        holder.epoch += 1
        holder.waiting_bytes = 0

    # ------------------------------------------------------------ bits

    def _take_bit(self, holder: _Holder) -> _Holder:
        used = self._live | self._retired
        bit = ~used & (used + 1)  # the lowest that is free
        holder.bit = bit
        self._live |= bit
        number = bit.bit_length() - 1
        self._by_bit[number : number + 1] = [holder]
        return holder

    def _retire_bit(self, holder: _Holder) -> None:
        """Its pages are nobody's; where there are none, the bit is free."""
        self._live &= ~holder.bit
        if holder.known:
            self._retired |= holder.bit
        holder.known = holder.forgotten = 0

    def _sweep_out(self, most: int) -> None:
        """Go on with a sweep, or begin one. Pages that came since it began have no retired bit."""
        if self._sweep is None:
            if not self._retired:
                return
            self._sweep = _Sweep(self._retired, list(self._masks))
        sweep, masks, interned = self._sweep, self._masks, self._interned
        some = sweep.keys[-most:]
        del sweep.keys[-most:]
        for key in some:
            mask = masks.get(key, 0)
            if mask & sweep.bits:
                mask &= ~sweep.bits
                if mask:
                    masks[key] = interned.setdefault(mask, mask)
                else:
                    del masks[key]
        if not sweep.keys:
            self._retired &= ~sweep.bits
            self._sweep = None

    # ------------------------------------------------------------ questions

    def match(self, keys: Sequence[int]) -> Mapping[Incarnation, int]:
        """How many of the first of these pages each node has, without a hole; those with none are
        left out."""
        masks, held = self._masks, self._live
        depth = 0
        found: dict[Incarnation, int] = {}
        for key in keys:
            still = held & masks.get(key, 0)
            if still != held:
                if depth:
                    self._note(found, held & ~still, depth)
                held = still
                if not held:
                    break
            depth += 1
        self._note(found, held if depth else 0, depth)
        if found and len(masks) > CROWDED * self._max_pages:
            self._rejuvenate(keys[:depth])
        return found

    def _note(self, found: dict[Incarnation, int], mask: int, depth: int) -> None:
        for holder in self._holders_in(mask):
            found[holder.node] = depth

    def _holders_in(self, mask: int) -> Iterable[_Holder]:
        if mask.bit_count() > FEW:
            return compress(self._by_bit, f"{mask:b}"[::-1].encode().translate(_DIGITS))
        found = []
        while mask:
            bit = mask & -mask
            found.append(self._by_bit[bit.bit_length() - 1])
            mask ^= bit
        return found

    def _rejuvenate(self, keys: Sequence[int]) -> None:
        """The first page last: without it the others cannot be found."""
        masks = self._masks
        for key in reversed(keys):
            mask = masks.pop(key, None)
            if mask is not None:
                masks[key] = mask


def _unpack(packed: bytes) -> "array[int]":
    keys = array("Q")
    keys.frombytes(packed)
    return keys
