"""The slots from which a batch computes with adapters. Pure.

    EMPTY ─assign─▶ PLACING ─placed─▶ READY ─release, or assigned to another─▶ ...

Who holds a slot is not written down here: it is derived from the queues each time it is asked, so
a request that ends in whatever way has nothing to give back.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from common.lifecycle import is_over
from common.lora.drain import Drain
from common.request import Req


@dataclass(eq=False, slots=True)
class Slot:
    index: int
    adapter: int | None = None
    """None: EMPTY."""
    ready: bool = False
    """The adapter's weights are in it: READY. Otherwise they are on their way: PLACING."""
    kept_for: Req | None = None
    """The request it was filled for: until one has entered, or this is over, it is not given away.
    Otherwise one that is before it in rank could take the slot again and again."""
    used: int = 0
    """Grows with each use of any slot."""
    drain: Drain | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the request it was filled for still waits to enter it."""
        return self.kept_for is not None and not is_over(self.kept_for)


class AdapterSlots:
    def __init__(self, count: int) -> None:
        self._slots = [Slot(index) for index in range(count)]
        self._by_adapter: dict[int, Slot] = {}
        self._uses = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def num_used(self) -> int:
        return len(self._by_adapter)

    def of(self, adapter: int) -> Slot | None:
        """The slot that holds the adapter, or is being filled with it."""
        return self._by_adapter.get(adapter)

    def assign(self, slot: Slot, adapter: int, kept_for: Req | None) -> int | None:
        """Begin to fill a slot; returns the adapter that was in it."""
        before = slot.adapter
        assert before is None or slot.ready, "a slot is given away while it is being filled"
        if before is not None:
            del self._by_adapter[before]
        slot.adapter, slot.ready, slot.kept_for, slot.drain = adapter, False, kept_for, None
        self._by_adapter[adapter] = slot
        self.touch(slot)
        return before

    def release(self, adapter: int) -> None:
        """The adapter is gone, or could not be placed."""
        slot = self._by_adapter.pop(adapter, None)
        if slot is not None:
            slot.adapter, slot.ready, slot.kept_for, slot.drain = None, False, None, None

    def touch(self, slot: Slot) -> None:
        """It was used."""
        self._uses += 1
        slot.used = self._uses

    def check(self) -> None:
        """Raise unless the index and the slots agree."""
        held = {slot.adapter: slot for slot in self._slots if slot.adapter is not None}
        if held != self._by_adapter:
            raise AssertionError("an adapter is in two slots, or its slot is not known")
        if any(slot.ready and slot.adapter is None for slot in self._slots):
            raise AssertionError("an empty slot counts as filled")
