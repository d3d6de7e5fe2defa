"""Which adapter gets which slot, and when: asked request by request, in the order of a queue. Pure.

A request whose adapter has no slot is passed over: those behind it go on. An idle slot (no request
that holds it, its adapter not pinned) is filled for the first that asks. What waits for too long
has a slot drained for it, see `drain`.

What holds a slot and who uses an adapter is derived from the scheduler's queues, at most once a
turn and only when somebody waits.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from common.lora.drain import Drain, closest_to_free, overdue
from common.lora.memory import HostMemory
from common.lora.slots import AdapterSlots, Slot
from common.lora.table import AdapterTable, Entry, Task
from common.plan import AdapterCommand, DropAdapter, PlaceAdapter, ReadAdapter, Row
from common.request import Req

Holders = Callable[[], Iterable[Req]]
"""Requests that need their adapter's slot until they have computed here."""
Unfinished = Callable[[], Iterable[Req]]
"""All requests whose router has not been told an end."""


class Placement:
    """Host memory and slots of one node."""

    def __init__(
        self,
        table: AdapterTable,
        num_slots: int,
        num_in_memory: int,
        drain_wait_s: float,
        counters: "Counter[str]",
        *,
        holders: Holders,
        unfinished: Unfinished,
    ) -> None:
        self.slots = AdapterSlots(num_slots)
        self.memory = HostMemory(num_in_memory)
        self.commands: list[AdapterCommand] = []
        self._table = table
        self._drain_wait_s = drain_wait_s
        self._counters = counters
        self._holders, self._unfinished = holders, unfinished
        self._now = 0.0
        self._held: dict[int, list[Req]] | None = None
        self._users: dict[int, bool] | None = None
        self._waits: dict[int, float] = {}
        """Adapters that were asked for in vain this turn, and since when they are wanted."""
        self._draining = False
        self._longest: dict[int, int] = {}
        """Of adapters whose slot drains: the most tokens that a request computing there has left.
        What is let in meanwhile does not make it more."""

    # ------------------------------------------------------------ one turn

    def begin_turn(self, now: float) -> None:
        """Requests have moved: forget what was derived from them."""
        self._now = now
        self._held = self._users = None
        if self._waits:
            self._waits = {}
        if self._longest:
            self._longest = {}

    def admit(self, req: Req) -> bool:
        """Whether the adapter of `req` has a slot for it, filled or being filled; else it waits.

        An idle slot is filled for it at once. Nothing is given: a request holds a slot by being in
        a queue whose members do, see `entered`.
        """
        assert req.lora is not None
        slot = self.slots.of(req.lora)
        if slot is None:
            admitted = self._fill_for(req) is not None
        else:
            admitted = slot.drain is None or self._still_admits(slot, slot.drain, req)
            if not slot.ready and slot.kept_for is None:
                slot.kept_for = req  # it was being filled before anybody could enter it
        self._note_wait(req, admitted)
        return admitted

    def ready(self, req: Req) -> bool:
        """Whether `req` may be computed now; else it goes on waiting."""
        assert req.lora is not None
        slot = self.slots.of(req.lora) or self._fill_for(req)
        is_ready = slot is not None and slot.ready
        self._note_wait(req, is_ready)
        return is_ready

    def entered(self, req: Req) -> None:
        """`req` has joined those that hold their adapter's slot."""
        assert req.lora is not None
        slot = self.slots.of(req.lora)
        assert slot is not None
        slot.kept_for = None
        self.slots.touch(slot)
        self.memory.touch(req.lora)
        if self._held is not None:
            self._held.setdefault(req.lora, []).append(req)

    def end_turn(self, rows: Sequence[tuple[Req, Row]]) -> None:
        """Begin to drain for who has waited too long, and end what nobody waits for any more."""
        if self._draining:
            self._tend_drains(max((len(row.token_ids) for _, row in rows), default=0))
        if self._waits:
            self._begin_drains()

    def prefetch(self, entry: Entry) -> None:
        """A request is coming: fill a slot that nobody here needs, if there is one."""
        if self.slots.of(entry.number) is None:
            self.fill(entry, since=None)

    def _fill_for(self, req: Req) -> Slot | None:
        assert req.lora is not None
        since = self._now if req.lora_since is None else req.lora_since
        return self.fill(self._table[req.lora], since=since, kept_for=req)

    def _note_wait(self, req: Req, goes_on: bool) -> None:
        """Only its adapter keeps it waiting, or not any more."""
        if not goes_on and req.lora_since is None:
            req.lora_since = self._now
        elif goes_on and req.lora_since is not None:
            req.lora_wait_s += self._now - req.lora_since
            req.lora_since = None

    # ------------------------------------------------------------ filling slots

    def fill(
        self, entry: Entry, *, since: float | None, kept_for: Req | None = None
    ) -> Slot | None:
        """Begin to fill an idle slot with an adapter; None if there is none, then it waits.

        `since`: when it was first wanted. None: it is not wanted yet, so it drives nobody out.
        `kept_for`: the request that wants it.
        """
        adapter = entry.number
        if adapter in self._waits:
            self._waits[adapter] = min(self._waits[adapter], self._now if since is None else since)
            return None
        slot = self._idle_slot(adapter, spare_wanted=since is None)
        if slot is None or not (adapter in self.memory or self.make_room(demanded=True)):
            if since is not None:
                self._waits[adapter] = since
            return None
        if self.slots.assign(slot, adapter, kept_for) is not None:
            self._counters["lora_slot_changes"] += 1
        if adapter in self.memory:
            self.place(entry, slot)
        else:
            self.memory.hold(adapter)
            entry.task = Task.READ
            self.commands.append(ReadAdapter(adapter, entry.path, entry.digest))
        return slot

    def place(self, entry: Entry, slot: Slot) -> None:
        """Its weights are in host memory: copy them into the slot that was assigned to it."""
        entry.task = Task.PLACE
        self.memory.touch(entry.number)
        self.commands.append(PlaceAdapter(entry.number, slot.index))

    def make_room(self, *, demanded: bool) -> bool:
        """One more place in host memory, taken from the least recently used that may go.

        `demanded`: a slot is being filled, so that also an adapter that requests use makes room, if
        it must: first one whose slot has its weights anyway. Otherwise only what nobody uses.
        """
        if not self.memory.is_full:
            return True
        in_use = self.in_use()
        victim = self.memory.oldest(lambda a: self._may_go(a) and a not in in_use)
        if victim is None and demanded:
            victim = self.memory.oldest(lambda a: self._may_go(a) and self.slots.of(a) is not None)
        if victim is None and demanded:
            victim = self.memory.oldest(self._may_go)
        if victim is None:
            return False
        self._counters["lora_evictions"] += 1
        self.drop(victim)
        return True

    def drop(self, adapter: int) -> None:
        """Forget its weights in host memory, if they are there."""
        if self.memory.forget(adapter):
            self.commands.append(DropAdapter(adapter))

    def _may_go(self, adapter: int) -> bool:
        entry = self._table[adapter]
        return not entry.pinned and entry.task is None

    def _idle_slot(self, adapter: int, *, spare_wanted: bool) -> Slot | None:
        """The slot to fill with `adapter`: an empty one, else one whose adapter nobody uses, else
        the least recently used of those idle."""
        idle = [slot for slot in self.slots if self._is_idle(slot, adapter)]
        empty = next((slot for slot in idle if slot.adapter is None), None)
        if empty is not None:
            return empty
        wanted = self.in_use()
        if spare_wanted:
            idle = [slot for slot in idle if slot.adapter not in wanted]
        return min(idle, key=lambda slot: (slot.adapter in wanted, slot.used), default=None)

    def _is_idle(self, slot: Slot, adapter: int) -> bool:
        """Whether nobody holds it, as far as `adapter` is concerned."""
        if slot.adapter is None:
            return True
        if not slot.ready or self._table[slot.adapter].pinned:
            return False
        if slot.is_kept or (slot.drain is not None and slot.drain.waiter != adapter):
            return False
        return slot.adapter not in self.held()

    # ------------------------------------------------------------ derived from the queues

    def held(self) -> dict[int, list[Req]]:
        """Adapter -> the requests that hold its slot."""
        if self._held is None:
            self._held = {}
            for req in self._holders():
                if req.lora is not None:
                    self._held.setdefault(req.lora, []).append(req)
        return self._held

    def in_use(self) -> dict[int, bool]:
        """Adapters of unfinished requests, and whether one of these waits for a slot."""
        if self._users is None:
            self._users = {}
            for req in self._unfinished():
                if req.lora is not None:
                    waits = req.lora_since is not None
                    self._users[req.lora] = waits or self._users.get(req.lora, False)
        return self._users

    # ------------------------------------------------------------ draining

    def _still_admits(self, slot: Slot, drain: Drain, req: Req) -> bool:
        assert slot.adapter is not None
        if slot.adapter not in self._longest:
            here = self.held().get(slot.adapter, ())
            computing = (r.remaining for r in here if r.slot is not None)
            self._longest[slot.adapter] = max(computing, default=0)
        return drain.admits(req.remaining, self._longest[slot.adapter])

    def _tend_drains(self, computed: int) -> None:
        self._draining = False
        for slot in self.slots:
            if slot.drain is None:
                continue
            slot.drain.on_step(computed)
            waiter = slot.drain.waiter
            if self.slots.of(waiter) is not None or not self._is_wanted(waiter):
                slot.drain = None
            else:
                self._draining = True

    def _is_wanted(self, adapter: int) -> bool:
        """Whether it still waits for a slot."""
        entry = self._table.get(adapter)
        return entry is not None and (entry.pinned or self.in_use().get(adapter, False))

    def _begin_drains(self) -> None:
        served = {slot.drain.waiter for slot in self.slots if slot.drain is not None}
        for adapter in overdue(self._waits.items(), self._now, self._drain_wait_s):
            if adapter in served:
                continue
            chosen = closest_to_free(self._busy_slots())
            if chosen is None:
                return
            index, longest = chosen
            slot = next(slot for slot in self.slots if slot.index == index)
            slot.drain = Drain(adapter, longest)
            self._draining = True
            self._counters["lora_drains"] += 1

    def _busy_slots(self) -> list[tuple[int, int]]:
        """(slot, most tokens left to a request there) of those that could be drained."""
        return [
            (slot.index, max((r.remaining for r in self.held().get(slot.adapter, ())), default=0))
            for slot in self.slots
            if slot.adapter is not None
            and slot.ready
            and not slot.is_kept
            and slot.drain is None
            and not self._table[slot.adapter].pinned
        ]
