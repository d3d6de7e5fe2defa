"""One linked node as the router knows it, and how it may be lost. Pure."""

from collections.abc import Callable
from enum import StrEnum
from typing import Generic, Self, TypeVar, overload

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


_Value = TypeVar("_Value")


class _Watched(Generic[_Value]):
    """An attribute from which others draw conclusions: they hear when it changes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, node: None, owner: type) -> Self: ...

    @overload
    def __get__(self, node: "Node", owner: type) -> _Value: ...

    def __get__(self, node: "Node | None", owner: type) -> "Self | _Value":
        if node is None:
            return self
        value: _Value = getattr(node, self._name)
        return value

    def __set__(self, node: "Node", value: _Value) -> None:
        if getattr(node, self._name) != value:
            setattr(node, self._name, value)
            node.on_change()


class Node:
    """One linked incarnation."""

    state = _Watched[NodeState]()
    linked = _Watched[bool]()
    pausing = _Watched[int]()
    """Pauses on their way to it."""
    adapters = _Watched[dict[str, AdapterInfo] | None]()
    """What it can serve, by name, as it said last; None until it has, and after a gap."""
    syncing = _Watched[bool]()
    """It is being given the adapters of the cluster."""

    def __init__(
        self,
        incarnation: Incarnation,
        hello: Hello,
        routing_id: bytes,
        heard_at: float,
        *,
        next_from: int,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` hears when what it can do has changed."""
        self.incarnation = incarnation
        self.hello = hello
        self.routing_id = routing_id
        self.heard_at = heard_at
        self.on_change = on_change
        self.stats = NodeStats()
        self.step_age_s = 0.0
        self.told: tuple[PeerNode, ...] = ()
        """Decode: the prefill nodes it was last told of."""
        self.next_from = next_from
        self.sent = 0
        self._state = NodeState.READY
        self._linked = True
        self._pausing = 0
        self._adapters: dict[str, AdapterInfo] | None = None
        self._syncing = False

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
