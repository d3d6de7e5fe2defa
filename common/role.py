"""What a role decides: the hooks that the prefill and the decode scheduler fill in.

`Scheduler` calls them and is all that calls them. Together they are the difference between the two
roles; everything else is common.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Generic

from common.events import FromPeer, PeerClosed, PeerProbed
from common.lifecycle import R, State
from common.messages import FailureKind, Generate, Incarnation, PeerNode
from common.plan import Notified, PeerAdded, PieceLanded, Row, Sample, WriteDone, WriteFailed


class Role(ABC, Generic[R]):
    """Only decisions; the state they are about is the scheduler's."""

    _WITHOUT_PAGES: ClassVar[tuple[State, ...]]
    """States in which a request of this role holds no KV yet."""
    _NOT_COMPUTED: ClassVar[tuple[State, ...]]
    """States in which it has computed nothing here yet."""

    @abstractmethod
    def _new_request(self, generate: Generate, router: Incarnation) -> R: ...

    @abstractmethod
    def _accept(self, req: R) -> None:
        """Put a checked new request into its first queue."""

    @abstractmethod
    def _pages_needed(self, req: R) -> int:
        """Most pages this request can ever hold here."""

    @abstractmethod
    def _retractable(self) -> Iterable[R]:
        """Requests that hold KV."""

    @abstractmethod
    def _slot_holders(self) -> Iterable[R]:
        """Requests that need their adapter where a batch computes with it, until they finish."""

    @abstractmethod
    def _let_go(self, req: R, kind: FailureKind, message: str) -> None:
        """Retire a stopped request, or park it in ABORTING while a transfer may touch its pages."""

    @abstractmethod
    def _advance(self) -> None:
        """Move what needs no forward pass; called each turn, also while paused."""

    @abstractmethod
    def _select(self) -> list[tuple[R, Row]]:
        """The next step's rows. Not called while paused."""

    @abstractmethod
    def _on_computed(self, req: R, row: Row, sample: Sample | None) -> None:
        """Take in one row's result."""

    @abstractmethod
    def _on_peer_event(self, event: FromPeer | PeerClosed | PeerProbed) -> None: ...

    @abstractmethod
    def _on_peer_lost(self, peer: Incarnation, why: str) -> None: ...

    @abstractmethod
    def _expire(self) -> None:
        """Act on time-outs."""

    @abstractmethod
    def _say_goodbye(self) -> None:
        """Tell the peers that this node leaves, holding nothing and writing nothing any more."""

    @abstractmethod
    def _on_transfer_event(
        self, event: PeerAdded | WriteDone | WriteFailed | Notified | PieceLanded
    ) -> None:
        """Take in what the transfer backend says, but for a peer's loss."""

    def _on_peers(self, router: Incarnation, nodes: Sequence[PeerNode] | None) -> None:
        """The prefill nodes that a router names, None once it is lost; for a role that dials."""
