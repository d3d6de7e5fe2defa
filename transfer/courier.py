"""What a transfer backend drives: commands go in, time passes in `progress`, events come out.

A `Poster` is one; the others stand before it, each with one concern, all in the same thread:

    FencedCourier ──▶ StagedCourier ──▶ Poster ──▶ the write library
    a write waits     pages go through   peers, leases,
    for its kernels   host memory        each write's end

A command that has to wait holds back those for the same peer that came after it, and no others.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.messages import Incarnation
from common.plan import (
    AddPeer,
    RemovePeer,
    RenewLease,
    TransferCommand,
    TransferEvent,
    Write,
    WriteFailed,
)

Ready = Callable[[], bool]
"""Whether something has come to pass; it stays so. Called on the transfer thread; never blocks.
What it raises says that it never will."""

Fence = Callable[[], Ready]
"""Called where commands are submitted: `Ready` is to tell of all pages computed until now."""


def at_once() -> bool:
    """The `Ready` of what needs no waiting."""
    return True


@dataclass(frozen=True, slots=True)
class Fenced:
    """A write that may begin once its pages are computed."""

    write: Write
    ready: Ready

    @property
    def peer(self) -> Incarnation:
        return self.write.peer


Order = TransferCommand | Fenced


def fenced(commands: Iterable[TransferCommand], fence: Fence | None) -> list[Order]:
    """`commands`, the writes among them behind what was computed until now."""
    given = list(commands)
    if fence is None or not any(isinstance(command, Write) for command in given):
        return [*given]
    ready = fence()
    return [Fenced(c, ready) if isinstance(c, Write) else c for c in given]


def refusals(orders: Iterable[Order | None], reason: str) -> list[WriteFailed]:
    """The ends of orders that will not be carried out."""
    writes = (order.write if isinstance(order, Fenced) else order for order in orders)
    return [WriteFailed(w.room, w.chunk, reason) for w in writes if isinstance(w, Write)]


class Courier(Protocol):
    """Carries out commands and says how each write ended; see `transfer.base` for the contract."""

    @property
    def num_open(self) -> int:
        """What has not ended and is worth a look soon."""
        ...

    @property
    def expecting(self) -> bool:
        """Whether peers' writes into this side are due (`ExpectWrites`)."""
        ...

    def handle(self, command: TransferCommand) -> None:
        """Carry out one command, or keep it; may block as long as a post does."""
        ...

    def progress(self) -> None:
        """One round: what has become of everything?"""
        ...

    def take_events(self) -> list[TransferEvent]:
        """What happened since the last call, oldest first."""
        ...

    def stop(self, reason: str) -> None:
        """Post nothing any more: every write that is not posted fails. What is posted goes on."""
        ...

    def abandon(self, reason: str) -> None:
        """End everything that has not ended, on the way to destroying the library's agent.

        The caller hands the events out only when that is done.
        """
        ...


Waiting = TypeVar("Waiting", bound=Order)


class PeerLine(Generic[Waiting]):
    """The orders for one peer that wait for the first of them, in the order of submission.

    A renewed lease overtakes writes: it is read when they are posted, and the newest counts. It
    does not overtake a change of the peer, to which it may belong.
    """

    def __init__(self, orders: Iterable[Waiting] = ()) -> None:
        self._orders: deque[Waiting] = deque(orders)

    def __len__(self) -> int:
        return len(self._orders)

    @property
    def first(self) -> Waiting:
        return self._orders[0]

    def append(self, order: Waiting) -> None:
        self._orders.append(order)

    def pop(self) -> Waiting:
        return self._orders.popleft()

    def lets_pass(self, order: Order) -> bool:
        """Whether `order` may go before all that wait."""
        if not isinstance(order, RenewLease):
            return False
        return not any(isinstance(waiting, AddPeer | RemovePeer) for waiting in self._orders)

    def refuse(self, reason: str) -> list[WriteFailed]:
        """Forget all of them; the ends of the writes."""
        refused = refusals(self._orders, reason)
        self._orders.clear()
        return refused
