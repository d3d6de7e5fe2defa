"""Feeds the index of cached pages with what nodes say, slice by slice; has them say it again."""

import asyncio
from collections.abc import Callable, Sequence

from common.messages import CacheUpdate, Hello, Incarnation, ListCache
from router.cache_index import CacheIndex
from router.effects import Send

REST_S = 0.002
"""Between two slices of the index's work: tokens go first."""


class CacheWatch:
    """Between the node link and the index; runs on the event loop."""

    def __init__(self, index: CacheIndex, send: Callable[[Sequence[Send]], None]) -> None:
        self._index = index
        self._send = send
        self._timer: asyncio.TimerHandle | None = None

    def on_hello(self, node: Incarnation, hello: Hello) -> None:
        """A node was welcomed."""
        self._index.join(node, hello.num_pages)

    def on_loss(self, node: Incarnation) -> None:
        """A node is gone, or its link is: it will tell all again."""
        self._index.leave(node)
        self._work()

    def on_update(self, node: Incarnation, update: CacheUpdate, now: float) -> None:
        """Small news is known at once, large news soon."""
        self._index.on_update(node, update, now)
        self._work()
        self.tick(now)

    def tick(self, now: float) -> None:
        """Ask whom the index does not understand any more."""
        due = self._index.due(now)
        if due:
            self._send([Send(node, ListCache()) for node in due])

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _work(self) -> None:
        if self._timer is None and self._index.work():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(REST_S, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        self._work()
