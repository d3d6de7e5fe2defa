"""What is put off to the end of the event loop's turn in which messages of nodes are read.

A turn may bring several messages. Listeners look at what they were told once all of it is settled:
one write for each stream, however many messages that was.
"""

from collections.abc import Callable


class TurnEnd:
    """Collects work, and does it when the turn ends."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def put_off(self, work: Callable[[], None]) -> None:
        """Do this at the turn's end. It must not raise."""
        self._due.append(work)

    def run(self) -> None:
        """The turn ends; work that comes of work is done too."""
        while self._due:
            due, self._due = self._due, []
            for work in due:
                work()
