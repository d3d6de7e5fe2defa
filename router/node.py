"""One linked node as the router knows it, and how it may be lost. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum

from common.messages import Adapter, AdapterInfo, Hello, Incarnation, NodeState, NodeStats, PeerNode
from common.modes import DisaggregationMode


class Loss(StrEnum):
    """Why the attempts on a node are over."""

    SILENT = "silent"
    UNREACHABLE = "unreachable"
    REPLACED = "replaced"
    """Another process has taken its name, and it did not object."""
    LEFT = "left"
    """It said goodbye."""
    RELINKED = "relinked"
    """It said Hello again: it holds nothing of ours any more."""
    GAP = "gap"
    """Messages on the way here were lost."""


@dataclass(slots=True, eq=False)
class Node:
    """One linked incarnation."""

    incarnation: Incarnation
    hello: Hello
    routing_id: bytes
    heard_at: float
    stats: NodeStats = field(default_factory=NodeStats)
    step_age_s: float = 0.0
    state: NodeState = NodeState.READY
    linked: bool = True
    pausing: int = 0
    """Pauses on their way to it."""
    adapters: dict[str, AdapterInfo] | None = None
    """What it can serve, by name, as it said last; None until it has, and after a gap."""
    syncing: bool = False
    """It is being given the adapters of the cluster."""
    told: tuple[PeerNode, ...] = ()
    """Decode: the prefill nodes it was last told of."""
    next_from: int = 2
    sent: int = 0

    @property
    def role(self) -> DisaggregationMode:
        return self.hello.role

    @property
    def takes_work(self) -> bool:
        ready = self.linked and self.state is NodeState.READY and not self.pausing
        return ready and self.is_equipped

    @property
    def is_equipped(self) -> bool:
        """Whether it has told its adapters and was given those it lacked."""
        return self.adapters is not None and not self.syncing

    def holds(self, adapter: Adapter | None) -> bool:
        """Whether it can serve this very content under this name; every node has the base model."""
        if adapter is None:
            return True
        info = (self.adapters or {}).get(adapter.name)
        return info is not None and info.digest == adapter.digest

    @property
    def stays(self) -> bool:
        """Whether it works, or will again after a pause."""
        return self.linked and self.state is not NodeState.DRAINING

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the node's whole page pool holds."""
        return self.hello.num_pages * self.hello.fingerprint.page_size

    @property
    def usable_tokens(self) -> int:
        """Tokens that its pages hold which are not in quarantine."""
        pages = self.hello.num_pages - self.stats.quarantined_pages
        return pages * self.hello.fingerprint.page_size

    def note_state(self, state: NodeState) -> None:
        """Who drains never works again: an older word that is still on its way changes nothing."""
        if self.state is not NodeState.DRAINING:
            self.state = state

    def number(self) -> int:
        """The next message's number on the way down."""
        self.sent += 1
        return self.sent
