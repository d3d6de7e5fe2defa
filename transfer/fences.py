"""Writes wait until the kernels that filled their pages have finished.

On a GPU a step's result may be known before all that was asked of the device is done, and what a
network card reads from its memory it reads at once. So each write comes with a question (`Ready`),
put to the device without waiting for it. The lease is read behind it, when the write is posted.
"""

from common.messages import Incarnation
from common.plan import ExpectWrites, TransferCommand, TransferEvent, WriteFailed
from transfer.courier import Courier, Fenced, Order, PeerLine


class FencedCourier:
    """Hands orders to `inner`, those of one peer in order, and a `Fenced` write once it is ready.

    Not thread-safe. A fence that fails ends its write, which was not posted, and nothing else.
    """

    def __init__(self, inner: Courier) -> None:
        self._inner = inner
        self._lines: dict[Incarnation, PeerLine[Order]] = {}
        """Of peers whose first order is a write that is not ready."""
        self._events: list[TransferEvent] = []

    @property
    def num_open(self) -> int:
        return self._inner.num_open + sum(len(line) for line in self._lines.values())

    @property
    def expecting(self) -> bool:
        return self._inner.expecting

    def handle(self, order: Order) -> None:
        line = None if isinstance(order, ExpectWrites) else self._lines.get(order.peer)
        if line is not None and not line.lets_pass(order):
            line.append(order)
        elif isinstance(order, Fenced):
            self._lines[order.peer] = PeerLine([order])
            self._advance(order.peer)
        else:
            self._inner.handle(order)

    def progress(self) -> None:
        for peer in list(self._lines):
            self._advance(peer)
        self._inner.progress()

    def _advance(self, peer: Incarnation) -> None:
        line = self._lines[peer]
        while line:
            command = self._released(line.first)
            if command is None:
                return
            line.pop()
            if not isinstance(command, WriteFailed):
                self._inner.handle(command)
        del self._lines[peer]

    def _released(self, order: Order) -> TransferCommand | WriteFailed | None:
        """What `order` is once nothing keeps it; None as long as something does."""
        if not isinstance(order, Fenced):
            return order
        try:
            return order.write if order.ready() else None
        except Exception as error:
            why = f"what fills its pages failed: {type(error).__name__}: {error}"
            failed = WriteFailed(order.write.room, order.write.chunk, why)
            self._events.append(failed)
            return failed

    def take_events(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events + self._inner.take_events()

    # ------------------------------------------------------------ the end

    def stop(self, reason: str) -> None:
        self._refuse_all(reason)
        self._inner.stop(reason)

    def abandon(self, reason: str) -> None:
        self._refuse_all(reason)
        self._inner.abandon(reason)

    def _refuse_all(self, reason: str) -> None:
        for line in self._lines.values():
            self._events += line.refuse(reason)
        self._lines.clear()
