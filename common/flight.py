"""Steps that were handed out and are not taken in yet, and what they hold on to. Pure.

    decided ─▶ launched ─▶ computed ─▶ taken in
                   └─ the next is decided here, where the runner does not wait for its device

A runner that does not wait for its device has one step in flight while the scheduler decides the
next. That next step knows less than it would a moment later:

* **What a request draws in flight is not known yet.** Its next row says "the token that my slot
  drew last" (`Row.from_slot`), which the device knows. A request whose `max_tokens` is reached with
  what is in flight gets no further row; one that turns out to have drawn a stop token has one row
  too many, whose result is thrown away (`wasted_rows`).
* **What a step in flight touches stays where it is.** A request may end while rows of it are in
  flight: by what it drew, by an abort, by the loss of its router. Routers and peers are told at
  once, but it *lingers*: its slot, its pages and its adapter's slot are given to nobody until the
  last step that has a row of it is taken in. Otherwise a page could be written by a peer and by
  that row at the same time.
* **Only some steps may be run ahead of** (`may_run_ahead`): those that draw all their tokens on the
  device (`common.drawing`) and score no prompt.

Whoever gives pages back for others (retraction under memory pressure) waits until nothing is in
flight, and so do control messages (`common.steps`): a pause finds a node that computes nothing.

After vLLM's asynchronous scheduling, which counts placeholders for tokens in flight as well.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Generic

from common.drawing import drawn_on_device
from common.kv_cache.manager import KVCacheManager
from common.lifecycle import R
from common.plan import Row
from common.slots import Slots

MAX_STEPS = 2
"""One that runs and one behind it, for as long as it takes to take the first one in."""


class Flight(Generic[R]):
    """Writes `computing` and `drawing` of requests, alone; all that stops gives its slot and its
    pages back through here."""

    def __init__(self, slots: Slots, kv: KVCacheManager) -> None:
        self._slots = slots
        self._kv = kv
        self._steps: deque[Sequence[tuple[R, Row]]] = deque()
        self._lingering: dict[R, bool] = {}
        """Whether pages, too, are given back once no step touches them; else only the slot."""

    def __len__(self) -> int:
        """Steps handed out and not taken in."""
        return len(self._steps)

    @property
    def newest(self) -> Sequence[tuple[R, Row]]:
        """The rows of the step handed out last; there is one."""
        return self._steps[-1]

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step may be decided before the newest is taken in."""
        if not self._steps:
            return True
        return len(self._steps) < MAX_STEPS and all(starmap(_leaves_the_host_alone, self.newest))

    def begin(self, step: Sequence[tuple[R, Row]]) -> None:
        """A step is handed out."""
        for req, row in step:
            req.computing += len(row.token_ids)
            if row.sample_index is not None:
                req.drawing += 1
        self._steps.append(step)

    def land(self) -> Sequence[tuple[R, Row]]:
        """The oldest step is computed and about to be taken in: it touches nothing any more."""
        step = self._steps.popleft()
        for req, row in step:
            req.computing -= len(row.token_ids)
            if row.sample_index is not None:
                req.drawing -= 1
        if self._lingering:
            self._settle()
        return step

    # ------------------------------------------------------------ what has ended

    @property
    def lingering(self) -> Iterable[R]:
        """Requests that have stopped, and whose slot or pages a step in flight touches."""
        return self._lingering.keys()

    def take_slot_back(self, req: R) -> None:
        """`req` computes no more; now or when no step touches what it has."""
        if req.computing:
            self._lingering.setdefault(req, False)
        else:
            self._slots.take_back(req)

    def release(self, req: R) -> None:
        """`req` has ended, and no transfer touches its pages: take them back with its slot, now or
        when no step does."""
        if req.computing:
            self._lingering[req] = True
        else:
            self._slots.take_back(req)
            self._kv.release(req)

    def _settle(self) -> None:
        for req in [req for req in self._lingering if not req.computing]:
            self._slots.take_back(req)
            if self._lingering.pop(req):
                self._kv.release(req)


def _leaves_the_host_alone(req: R, row: Row) -> bool:
    if row.prompt_logprobs is not None:
        return False
    return row.sample_index is None or drawn_on_device(req.sampling, row.sample_index)
