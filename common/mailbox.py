"""Between the engine thread and a thread that works for it: commands there, events back."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Command = TypeVar("Command")
Event = TypeVar("Event")


class Mailbox(Generic[Command, Event]):
    """Two queues. The engine posts and polls, neither of which blocks; the worker reads `commands`,
    where None only says that something else has changed, and publishes."""

    def __init__(self) -> None:
        self.commands: SimpleQueue[Command | None] = SimpleQueue()
        self._events: deque[Event] = deque()
        self.wake: Callable[[], None] = _no_one
        """Called, on the publishing thread, after something new became available to `poll`."""

    def post(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self.commands.put(command)

    def poll(self) -> list[Event]:
        """Everything new, oldest first."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def publish(self, events: Iterable[Event]) -> None:
        self._events.extend(events)
        self.wake()

    def unread(self) -> Iterator[Command]:
        """Take commands that no thread will read any more."""
        while True:
            try:
                command = self.commands.get_nowait()
            except Empty:
                return
            if command is not None:
                yield command


def _no_one() -> None:
    """The wake-up before there is anybody to be woken."""
