"""A node's adapters: verbs, the loader's answers and requests come in, commands and answers out.

Pure. One command of an adapter is under way at a time, and each ends with one event, so an adapter
is only let go when nothing of it is on its way. Loads are read one after the other; when host
memory is full of adapters in use, what was read is checked and dropped again, and read anew when a
request wants it. So at most one adapter more than `max_loaded_loras` is in memory, for a moment.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from common.events import AdminDone
from common.intake import Refusal
from common.ledger import Ledger
from common.lora.invariants import check_adapters
from common.lora.placement import Holders, Placement, Unfinished
from common.lora.table import AdapterTable, Entry, Stage, Task
from common.messages import AdapterInfo, FailureKind, LoadAdapter, NodeStats, UnloadAdapter
from common.plan import (
    AdapterCommand,
    AdapterEvent,
    AdapterFailed,
    AdapterPlaced,
    AdapterRead,
    DropAdapter,
    ReadAdapter,
    Row,
)
from common.request import Req
from common.settings import SchedulerSettings

LEAVING = "this node is leaving"


class AdapterDesk:
    """Everything about adapters that a scheduler does not know from its queues."""

    def __init__(
        self,
        settings: SchedulerSettings,
        ledger: Ledger,
        *,
        holders: Holders,
        unfinished: Unfinished,
    ) -> None:
        self._table = AdapterTable()
        self._counters = ledger.counters
        self._ledger = ledger
        self._unfinished = unfinished
        self._placement = Placement(
            self._table,
            settings.max_loras_per_batch,
            settings.max_loaded_loras,
            settings.lora_drain_wait_s,
            ledger.counters,
            holders=holders,
            unfinished=unfinished,
        )
        self._answers: list[AdminDone] = []
        self._changing: dict[int, Entry] = {}
        """Those that are LOADING or UNLOADING."""
        self._checking: int | None = None
        """The one that is read for its load."""
        self._tickets: set[int] = set()
        """Not answered yet."""

    # ------------------------------------------------------------ verbs

    def change(self, ticket: int, verb: LoadAdapter | UnloadAdapter) -> None:
        """Load or unload; answered in the plan of this turn or of a later one."""
        if isinstance(verb, LoadAdapter):
            self._load_one(ticket, verb)
        else:
            self._unload_one(ticket, verb)

    def _load_one(self, ticket: int, verb: LoadAdapter) -> None:
        """Answered when the adapter can serve, or why it cannot."""
        self._tickets.add(ticket)
        entry = self._table.named(verb.name)
        if entry is not None:
            self._load_again(ticket, verb, entry)
            return
        slots, pinned = len(self._placement.slots), self._table.num_pinned
        if not slots:
            problem = "cannot be loaded: this node's max_loras_per_batch is 0"
            self._answer(ticket, False, f"adapter {verb.name!r} {problem}")
            return
        if verb.pinned and pinned >= slots - 1:
            problem = f"would starve the others: {pinned} of {slots} slots are pinned already"
            self._answer(ticket, False, f"adapter {verb.name!r} pinned {problem}")
            return
        entry = self._table.add(verb)
        entry.loads.append((ticket, verb.digest))
        self._changing[entry.number] = entry

    def _load_again(self, ticket: int, verb: LoadAdapter, entry: Entry) -> None:
        """The name is taken: fine if what was asked for is what is here, or on its way."""
        named = f"adapter {verb.name!r} is already loaded"
        if entry.stage is Stage.UNLOADING:
            self._answer(ticket, False, f"{named}, and on its way out")
        elif verb.pinned is not entry.pinned:
            pinned = "pinned" if entry.pinned else "not pinned"
            self._answer(ticket, False, f"{named}, {pinned}")
        elif entry.stage is Stage.SERVING:
            same = bool(verb.digest) and verb.digest == entry.digest
            self._answer(ticket, same, named, entry.digest if same else "")
        elif verb.digest or verb.path == entry.path:
            entry.loads.append((ticket, verb.digest))
        else:
            self._answer(ticket, False, f"{named}, from {entry.path}")

    def _unload_one(self, ticket: int, verb: UnloadAdapter) -> None:
        """Takes no new request of it from now on; answered once it is gone."""
        self._tickets.add(ticket)
        entry = self._table.named(verb.name)
        if entry is None:
            self._answer(ticket, False, f"adapter {verb.name!r} was never loaded")
            return
        if entry.stage is Stage.LOADING:
            self._give_up_load(entry, f"adapter {entry.name!r} was unloaded while it was loading")
            self._answer(ticket, True, f"adapter {entry.name!r} is unloaded")
            return
        self._table.move(entry, Stage.UNLOADING)
        self._changing[entry.number] = entry
        entry.unloads.append(ticket)

    def _give_up_load(self, entry: Entry, why: str) -> None:
        """Nobody has used it, so its name is free at once; what is under way, perhaps a long
        download, ends by itself and finds that nobody wants it."""
        self._answer_loads(entry, why)
        entry.pinned = False
        self._table.move(entry, Stage.UNLOADING)
        self._table.forget_name(entry)

    def dismiss(self, *, for_good: bool) -> None:
        """The node leaves: no load is worth waiting for, and at the end no unload either."""
        for entry in [e for e in self._changing.values() if e.stage is Stage.LOADING]:
            self._give_up_load(entry, LEAVING)
        if for_good:
            for entry in self._changing.values():
                self._answer_unloads(entry, False, LEAVING)

    # ------------------------------------------------------------ what the loader says

    def on_event(self, event: AdapterEvent) -> str | None:
        """Take in a command's end; returns why the requests that wait for this adapter fail."""
        entry = self._table.get(event.adapter)
        if entry is None or entry.task is None:
            self._counters["unexpected_adapter_events"] += 1
            return None
        task, entry.task = entry.task, None
        match event:
            case AdapterRead():
                return self._on_read(entry, event)
            case AdapterPlaced():
                self._on_placed(entry)
                return None
            case AdapterFailed(_, error):
                return self._on_failed(entry, task, error)

    def _on_read(self, entry: Entry, event: AdapterRead) -> str | None:
        self._counters["lora_reads"] += 1
        if entry.digest not in ("", event.digest):
            self._placement.commands.append(DropAdapter(entry.number))
            return self._on_failed(
                entry, Task.READ, f"its content is not {entry.digest}: {event.digest}"
            )
        entry.digest, entry.rank, entry.checked = event.digest, event.rank, True
        if self._checking == entry.number:
            self._checking = None
            self._on_checked(entry)
        else:
            slot = self._placement.slots.of(entry.number)
            assert slot is not None, "read for no slot"
            self._placement.place(entry, slot)
        return None

    def _on_checked(self, entry: Entry) -> None:
        """Read for its load: kept in host memory if there is room, and served if it need not be in
        a slot first."""
        keep = entry.stage is Stage.LOADING and self._placement.make_room(demanded=entry.pinned)
        if keep:
            self._placement.memory.hold(entry.number)
        else:
            self._placement.commands.append(DropAdapter(entry.number))
        if entry.stage is Stage.LOADING and not entry.pinned:
            self._serve(entry)

    def _on_placed(self, entry: Entry) -> None:
        self._counters["lora_placements"] += 1
        slot = self._placement.slots.of(entry.number)
        assert slot is not None, "placed in no slot"
        slot.ready = True
        if entry.stage is Stage.LOADING:
            self._serve(entry)

    def _serve(self, entry: Entry) -> None:
        self._table.move(entry, Stage.SERVING)
        del self._changing[entry.number]
        self._answer_loads(entry)

    def _on_failed(self, entry: Entry, task: Task, error: str) -> str | None:
        why = f"adapter {entry.name!r}: {error}"
        if self._checking == entry.number:
            self._checking = None
        if task is Task.READ:
            self._counters["lora_read_failures"] += 1
            self._placement.memory.forget(entry.number)
        else:
            self._counters["lora_placement_failures"] += 1
        self._placement.slots.release(entry.number)
        if entry.stage is not Stage.LOADING:
            return why
        self._answer_loads(entry, why)
        self._remove(entry)
        return None

    # ------------------------------------------------------------ requests

    def refusal(self, req: Req) -> Refusal | None:
        """Why this node takes no request of this adapter; None if it does."""
        adapter = req.adapter
        if adapter is None or self._table.serving(adapter) is not None:
            return None
        entry = self._table.named(adapter.name)
        if entry is None or entry.stage is Stage.LOADING:
            problem = "is not loaded here"
        elif entry.stage is Stage.UNLOADING:
            problem = "is being unloaded"
        else:
            problem = f"has other content here: {entry.digest}"
        return FailureKind.ADAPTER, f"adapter {adapter.name!r} {problem}"

    def assign(self, req: Req) -> None:
        """An accepted request: from now on it is known by this node's number of its adapter."""
        if req.adapter is None:
            return
        entry = self._table.serving(req.adapter)
        assert entry is not None, "a request was accepted for an adapter that is not here"
        req.lora = entry.number
        self._placement.memory.touch(entry.number)

    def prefetch(self, req: Req, now: float) -> None:
        """It will want a slot soon: one that nobody here needs is filled for it."""
        if req.lora is not None:
            self._placement.begin_turn(now)
            self._placement.prefetch(self._table[req.lora])

    def admit(self, req: Req) -> bool:
        """See `Placement.admit`."""
        return req.lora is None or self._placement.admit(req)

    def ready(self, req: Req) -> bool:
        """See `Placement.ready`."""
        return req.lora is None or self._placement.ready(req)

    def entered(self, req: Req) -> None:
        """See `Placement.entered`."""
        if req.lora is not None:
            self._placement.entered(req)

    def starts(self, req: Req) -> None:
        """`req` computes from now on: it has waited for its adapter for the last time."""
        if req.lora is not None:
            self._placement.entered(req)
            self._ledger.waited("adapter_wait", req.lora_wait_s)

    def slot_of(self, req: Req) -> int | None:
        """Where the weights are that a request computes with now; None for the base model."""
        if req.lora is None:
            return None
        slot = self._placement.slots.of(req.lora)
        assert slot is not None, f"computed and adapter {req.lora} has no slot"
        assert slot.ready, f"computed before adapter {req.lora} is there"
        return slot.index

    # ------------------------------------------------------------ turns

    def begin_turn(self, now: float) -> None:
        """Before requests are moved: go on with what is loaded and unloaded."""
        self._placement.begin_turn(now)
        for entry in tuple(self._changing.values()):
            if entry.task is not None:
                continue
            if entry.stage is Stage.UNLOADING:
                if entry.number not in self._placement.in_use():
                    self._answer_unloads(entry, True, f"adapter {entry.name!r} is unloaded")
                    self._remove(entry)
            elif not entry.checked:
                self._check(entry)
            else:
                entry.since = now if entry.since is None else entry.since
                self._placement.fill(entry, since=entry.since)

    def end_turn(
        self, rows: Sequence[tuple[Req, Row]]
    ) -> tuple[tuple[AdapterCommand, ...], tuple[AdminDone, ...]]:
        """After the step was chosen: what the loader shall do, and answers to verbs."""
        self._placement.end_turn(rows)
        commands, answers = tuple(self._placement.commands), tuple(self._answers)
        self._placement.commands.clear()
        self._answers.clear()
        return commands, answers

    def _check(self, entry: Entry) -> None:
        """Read it for its load, one after the other."""
        if self._checking is None:
            self._checking = entry.number
            entry.task = Task.READ
            command = ReadAdapter(entry.number, entry.path, entry.digest)
            self._placement.commands.append(command)

    def _remove(self, entry: Entry) -> None:
        self._placement.slots.release(entry.number)
        self._placement.drop(entry.number)
        self._table.remove(entry)
        del self._changing[entry.number]

    # ------------------------------------------------------------ answers

    def _answer(self, ticket: int, ok: bool, message: str, digest: str = "") -> None:
        self._tickets.discard(ticket)
        self._answers.append(AdminDone(ticket, ok, message, digest))

    def _answer_loads(self, entry: Entry, problem: str | None = None) -> None:
        for ticket, expected in entry.loads:
            if problem is not None:
                self._answer(ticket, False, problem)
            elif expected in ("", entry.digest):
                self._answer(ticket, True, f"adapter {entry.name!r} is loaded", entry.digest)
            else:
                message = f"adapter {entry.name!r} is already loaded with other content"
                self._answer(ticket, False, message)
        entry.loads.clear()

    def _answer_unloads(self, entry: Entry, ok: bool, message: str) -> None:
        for ticket in entry.unloads:
            self._answer(ticket, ok, message)
        entry.unloads.clear()

    # ------------------------------------------------------------ reports, invariants

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """What this node can serve; the same object until that changes."""
        return self._table.infos

    def add_to(self, stats: NodeStats) -> NodeStats:
        """`stats` with what is to be said of adapters."""
        slots = self._placement.slots
        if not len(self._table):
            return msgspec.structs.replace(stats, lora_slots=len(slots))
        reqs = self._unfinished()
        running = Counter(self._table[r.lora].name for r in reqs if r.lora is not None)
        return msgspec.structs.replace(
            stats,
            lora_slots=len(slots),
            lora_slots_used=slots.num_used,
            loras_in_memory=len(self._placement.memory),
            running_loras=dict(running),
        )

    def check(self, reqs: Iterable[Req]) -> None:
        """Raise unless table, memory, slots, tickets and requests agree."""
        check_adapters(self._table, self._placement, self._checking, reqs)
        pending = {ticket for e in self._table for ticket, _ in e.loads}
        pending |= {ticket for e in self._table for ticket in e.unloads}
        if pending != self._tickets:
            raise AssertionError(f"tickets {pending ^ self._tickets} are lost, or answered twice")
        changing = {e.number for e in self._table if e.stage is not Stage.SERVING}
        if changing != self._changing.keys():
            raise AssertionError("an adapter changes and nobody looks after it")
