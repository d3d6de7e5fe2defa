"""The life-cycle of a request on a node: which queues exist, and which moves between them.

Being in a queue *is* a request's state; `ReqQueue.take` is the only mover, and raises on a move
that the node's table does not have. Each node owns one table:

    prefill   BOOTSTRAP ─▶ WAITING ─▶ PREFILLING ─▶ INFLIGHT ─▶ (ended)
                                           └────────────┴──▶ ABORTING ─▶ (ended)

    decode    PREALLOC ─▶ TRANSFER ─▶ WAITING ─▶ RUNNING ─▶ (ended)
                 │            └──▶ ABORTING ─▶ (ended)  ▲
                 └──▶ PREFILLING ───────────────────────┘

A decode node that computes a prompt itself (no prefill node takes part) passes through PREFILLING.
A request may end from every state but one in which a posted write can still touch its pages: there
it passes through ABORTING, whose only exit is the transfer's own event.

The prefill table has no RUNNING: a prefill node cannot hold a running request, whatever its code
tries. After h11's and dask's state machines: every transition in one table in one file.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Generic, TypeVar

from common.request import Req


class State(Enum):
    BOOTSTRAP = auto()
    """Prefill: the destination is not known yet."""
    PREALLOC = auto()
    """Decode: waits for its link to prefill and for pages."""
    TRANSFER = auto()
    """Decode: pages are named to prefill, which may be writing into them."""
    WAITING = auto()
    """Everything is here but a place in the batch (prefill: pages too)."""
    PREFILLING = auto()
    """Holds pages and a slot, and computes its prompt chunk by chunk."""
    INFLIGHT = auto()
    """Prefill: computed, its last writes are posted."""
    RUNNING = auto()
    """Decode: one token a step."""
    ABORTING = auto()
    """Over for its router, but a transfer may still touch its pages."""
    ENDED = auto()
    """No queue holds it and no page is its own."""


Edges = Mapping[State | None, frozenset[State]]

PREFILL_EDGES: Edges = {
    None: frozenset({State.BOOTSTRAP}),
    State.BOOTSTRAP: frozenset({State.WAITING, State.ENDED}),
    State.WAITING: frozenset({State.PREFILLING, State.ENDED}),
    State.PREFILLING: frozenset({State.INFLIGHT, State.ABORTING, State.ENDED}),
    State.INFLIGHT: frozenset({State.ABORTING, State.ENDED}),
    State.ABORTING: frozenset({State.ENDED}),
}

DECODE_EDGES: Edges = {
    None: frozenset({State.PREALLOC}),
    State.PREALLOC: frozenset({State.TRANSFER, State.PREFILLING, State.ENDED}),
    State.PREFILLING: frozenset({State.RUNNING, State.ENDED}),
    State.TRANSFER: frozenset({State.WAITING, State.ABORTING, State.ENDED}),
    State.WAITING: frozenset({State.RUNNING, State.ENDED}),
    State.RUNNING: frozenset({State.ENDED}),
    State.ABORTING: frozenset({State.ENDED}),
}


class IllegalTransition(Exception):
    """A request was moved along an edge that its node's table does not have: a bug."""


R = TypeVar("R", bound=Req)


class ReqQueue(Generic[R]):
    """Requests in one state, in rank order: by priority, the oldest of equals first."""

    def __init__(self, state: State, edges: Edges) -> None:
        if state is not State.ENDED and state not in edges:
            raise IllegalTransition(f"this node has no state {state.name}")
        self.state = state
        self._edges = edges
        self._reqs: list[R] = []

    def take(self, req: R) -> None:
        """Move `req` here from whichever queue holds it."""
        source: ReqQueue[R] | None = req.queue
        origin = None if source is None else source.state
        if self.state not in self._edges.get(origin, frozenset()):
            before = "new" if origin is None else origin.name
            raise IllegalTransition(f"{req.rid}: {before} -> {self.state.name}")
        if source is not None:
            source._drop(req)
        req.queue = self
        if self.state is not State.ENDED:
            insort(self._reqs, req, key=_rank)

    def _drop(self, req: R) -> None:
        index = bisect_left(self._reqs, req.rank, key=_rank)
        if self._reqs[index] is not req:
            raise IllegalTransition(f"{req.rid} is not in {self.state.name}, which it names")
        del self._reqs[index]

    def __iter__(self) -> Iterator[R]:
        return iter(self._reqs)

    def __len__(self) -> int:
        return len(self._reqs)

    def __contains__(self, req: object) -> bool:
        return isinstance(req, Req) and req.queue is self

    def snapshot(self) -> tuple[R, ...]:
        """The present members, first in rank first; stays whole while they are moved."""
        return tuple(self._reqs)

    @property
    def first(self) -> R | None:
        return self._reqs[0] if self._reqs else None

    @property
    def last(self) -> R | None:
        return self._reqs[-1] if self._reqs else None


def is_over(req: Req) -> bool:
    """Whether its router has been told its end; it is in a queue, or was."""
    state: State = req.queue.state
    return state is State.ABORTING or state is State.ENDED


def _rank(req: Req) -> tuple[int, float, int]:
    return req.rank
