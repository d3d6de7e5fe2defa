"""From the I/O thread to the engine thread: a queue that can be waited on without spinning."""

import contextlib
import os
import select
import threading
from collections import deque

from common.events import Event


class Inbox:
    """Events in order, and an eventfd that any thread may ring.

    One thread drains and waits (the engine); any thread puts and wakes. `deque` makes append and
    popleft atomic; the lock only keeps a late `wake` off a closed, perhaps reused, descriptor. It
    is reentrant because a signal handler may wake the very thread that is just closing.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._lock = threading.RLock()
        self._fd: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def put(self, event: Event) -> None:
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        """Make the current or the next `wait` return at once. Harmless after `close`."""
        with self._lock:
            if self._fd is not None:
                os.eventfd_write(self._fd, 1)

    def drain(self) -> list[Event]:
        """All events so far, oldest first; never blocks."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def wait(self, timeout_s: float) -> None:
        """Sleep until an event or a wake-up comes, at most `timeout_s`."""
        if self._fd is None:
            return
        if not self._events:
            self._poll.poll(max(0.0, timeout_s) * 1000)
        with contextlib.suppress(BlockingIOError):  # nobody rang: the time is over
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Give the descriptor back; called by the thread that waits."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
