"""What must hold of adapters between two steps, checked after every step of the tests. Pure."""

from collections.abc import Iterable

from common.lora.placement import Placement
from common.lora.table import AdapterTable, Stage, Task
from common.request import Req


class AdapterMixUp(AssertionError):
    """An adapter is where it must not be, or is missing where it is used: a bug."""


def check_adapters(
    table: AdapterTable, placement: Placement, checking: int | None, reqs: Iterable[Req]
) -> None:
    """Raise AdapterMixUp unless slots, host memory and requests agree with the table.

    `checking`: the adapter that is read for its load.
    """
    slots, memory = placement.slots, placement.memory
    slots.check()
    for slot in slots:
        entry = None if slot.adapter is None else table.get(slot.adapter)
        if slot.adapter is not None and entry is None:
            raise AdapterMixUp(f"slot {slot.index} holds an adapter that is gone")
        if entry is not None and slot.ready is not (entry.task is None):
            raise AdapterMixUp(f"slot {slot.index} of {entry.name!r} is filled, or never will be")
    for entry in table:
        slot_of = slots.of(entry.number)
        if entry.task is Task.READ and slot_of is None and entry.number != checking:
            raise AdapterMixUp(f"{entry.name!r} is read for nobody")
        if entry.task is Task.PLACE and (slot_of is None or entry.number not in memory):
            raise AdapterMixUp(f"{entry.name!r} is copied from nowhere, or to no slot")
        if entry.pinned and entry.stage is Stage.SERVING and (slot_of is None or not slot_of.ready):
            raise AdapterMixUp(f"{entry.name!r} is pinned and has no slot")
    if len(memory) > memory.capacity or any(table.get(number) is None for number in memory):
        raise AdapterMixUp(f"{list(memory)} are in memory, for which {memory.capacity} may be")
    if table.num_pinned > max(0, len(slots) - 1):
        raise AdapterMixUp(f"{table.num_pinned} of {len(slots)} slots are pinned")
    for req in reqs:
        _check_request(req, table, placement)


def _check_request(req: Req, table: AdapterTable, placement: Placement) -> None:
    if (req.lora is None) is not (req.adapter is None):
        raise AdapterMixUp(f"{req.rid} names an adapter and has none, or the other way round")
    if req.lora is None or req.adapter is None:
        return
    entry, slot = table.get(req.lora), placement.slots.of(req.lora)
    if req.slot is not None and (slot is None or not slot.ready):
        raise AdapterMixUp(f"{req.rid} computes and its adapter has no slot")
    if entry is not None and (entry.name, entry.digest) != (req.adapter.name, req.adapter.digest):
        raise AdapterMixUp(f"{req.rid} computes with {entry.name!r}, {entry.digest}")
