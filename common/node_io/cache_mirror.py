"""What routers are told of this node's prefix cache: changes in batches, and all of it on demand.

    CacheChanged ──▶ CacheMirror ── batch, net of what came and went ▶ CacheFeed (one a link)
                          └──────── snapshot, in parts ──────────────▶     └─▶ CacheUpdate 1, 2, …

The mirror exists because the cache itself belongs to the engine thread. Every feed gets the same
changes in the same order, and a snapshot between two batches, so what a router knows is always what
the cache was a moment ago. A feed gives one bounded message at a time: tokens share the socket.
Pure.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from common.messages import CacheUpdate
from common.plan import CacheChanged

PART_KEYS = 65_536
"""Keys that one message stores, or evicts, at most: half a megabyte."""


@dataclass(frozen=True, slots=True)
class Part:
    """An update without its number, shared by all links."""

    reset: bool
    evicted: bytes
    stored: bytes


class CacheMirror:
    """The keys of all cached pages, and what has changed since the last batch."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._changed: dict[int, bool] = {}
        """Key -> whether it is there now; it was not so at the last batch."""
        self._cleared = False

    def __len__(self) -> int:
        return len(self._keys)

    def apply(self, change: CacheChanged) -> None:
        """Take in what the engine says."""
        if change.cleared:
            self._keys.clear()
            self._changed.clear()
            self._cleared = True
        for key in change.evicted:
            if key in self._keys:
                self._keys.remove(key)
                self._note(key, present=False)
        for key in change.stored:
            if key not in self._keys:
                self._keys.add(key)
                self._note(key, present=True)

    def take_batch(self) -> list[Part]:
        """All that has changed since the last call; nothing where that came to nothing."""
        evicted = [key for key, present in self._changed.items() if not present]
        stored = [key for key, present in self._changed.items() if present]
        reset, self._cleared = self._cleared, False
        self._changed.clear()
        return _parts(reset, evicted, stored) if reset or evicted or stored else []

    def snapshot(self) -> list[Part]:
        """All that is cached. Take the batch before it, for the other links."""
        assert not self._changed
        assert not self._cleared
        return _parts(True, (), self._keys)

    def _note(self, key: int, *, present: bool) -> None:
        """A second change of one key since the last batch takes back the first."""
        if key in self._changed:
            del self._changed[key]
        else:
            self._changed[key] = present


class CacheFeed:
    """What one linked router still has to be told."""

    def __init__(self) -> None:
        self._parts: deque[Part] = deque()
        self._sent = 0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, parts: Iterable[Part]) -> None:
        self._parts.extend(parts)

    def restart(self, snapshot: Iterable[Part]) -> None:
        """The router wants to hear all; what was to be said before is in it."""
        self._parts = deque(snapshot)

    def next_update(self) -> CacheUpdate:
        """The next message; ask only where there is one."""
        part = self._parts.popleft()
        self._sent += 1
        return CacheUpdate(
            seq=self._sent, reset=part.reset, evicted=part.evicted, stored=part.stored
        )


def _parts(reset: bool, evicted: Iterable[int], stored: Iterable[int]) -> list[Part]:
    """Bounded messages; only the first resets, and all evictions come before what is stored."""
    gone, here = _chunks(evicted), _chunks(stored)
    if len(gone) <= 1 and len(here) <= 1:
        return [Part(reset, b"".join(gone), b"".join(here))]
    bodies = [(chunk, b"") for chunk in gone] + [(b"", chunk) for chunk in here]
    return [Part(reset and not i, *body) for i, body in enumerate(bodies)]


def _chunks(keys: Iterable[int]) -> list[bytes]:
    """Eight bytes a key, little endian as `CacheUpdate` wants it."""
    remaining = iter(keys)
    chunks = []
    while chunk := array("Q", islice(remaining, PART_KEYS)):
        chunks.append(chunk.tobytes())
    return chunks
