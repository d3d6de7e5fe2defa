"""Tells the routers what this node's prefix cache holds; runs in the I/O thread's loop.

A change waits up to `BATCH_S` for others, and every link gets at most one message in that time, so
that a large snapshot never stands before tokens.
"""

import asyncio
from collections.abc import Callable

from common.messages import CacheUpdate, Incarnation
from common.node_io.cache_mirror import CacheFeed, CacheMirror
from common.plan import CacheChanged

BATCH_S = 0.05
"""From a change to the message that tells of it, about."""


class CacheNews:
    """The mirror, the feeds of all linked routers, and when they speak."""

    def __init__(self, send: Callable[[Incarnation, CacheUpdate], None]) -> None:
        self._send = send
        self._mirror = CacheMirror()
        self._feeds: dict[Incarnation, CacheFeed] = {}
        self._timer: asyncio.TimerHandle | None = None

    def on_change(self, change: CacheChanged) -> None:
        """The engine's cache has changed."""
        self._mirror.apply(change)
        self._speak_soon()

    def on_linked(self, router: Incarnation) -> None:
        """A router has welcomed this node: it knows nothing and counts from 1."""
        self._feeds[router] = CacheFeed()
        if len(self._mirror):
            self.on_asked(router)

    def on_asked(self, router: Incarnation) -> None:
        """A linked router wants to hear all of it."""
        feed = self._feeds.get(router)
        if feed is not None:
            self._share_changes()
            feed.restart(self._mirror.snapshot())
            self._speak_soon()

    def on_lost(self, router: Incarnation) -> None:
        self._feeds.pop(router, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _speak_soon(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(BATCH_S, self._speak)

    def _speak(self) -> None:
        self._timer = None
        self._share_changes()
        for router, feed in tuple(self._feeds.items()):
            if feed:
                self._send(router, feed.next_update())
        if any(self._feeds.values()):
            self._speak_soon()

    def _share_changes(self) -> None:
        parts = self._mirror.take_batch()
        for feed in self._feeds.values():
            feed.add(parts)
