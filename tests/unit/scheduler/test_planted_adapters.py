"""Faults of adapters that the design excludes, planted one by one: each must be noticed."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from common.lora.desk import AdapterDesk
from common.lora.placement import Placement
from common.lora.slots import AdapterSlots, Slot
from common.lora.table import AdapterTable, Entry
from common.messages import Adapter
from common.request import Req
from common.scheduler import Scheduler
from common.tombstones import Tombstone
from decode_node.request import DecodeReq
from decode_node.scheduler import DecodeScheduler
from tests.unit.scheduler import test_lora_drain, test_lora_slots, test_lora_usage, test_lora_verbs
from tests.unit.scheduler.test_lora_fuzz import run
from tests.unit.scheduler.test_lora_race import race

NOTICED = (AssertionError, KeyError)

Plant = Callable[[pytest.MonkeyPatch], None]


def fuzz() -> None:
    for seed in range(60):
        run(seed)


def short_race() -> None:
    race(20)


def finished_requests_still_count_as_running(patch: pytest.MonkeyPatch) -> None:
    """As in sglang#27597: the last step's finished requests are still in the set."""
    finished: list[Req] = []
    retire, live = Scheduler._retire, Scheduler._live

    def lingering(self: Any, req: Req, stone: Tombstone) -> None:
        retire(self, req, stone)
        finished.append(req)

    def planted(self: Any) -> Iterator[Req]:
        yield from live(self)
        yield from (req for req in finished[-2:] if req.lora is not None)

    patch.setattr(Scheduler, "_retire", lingering)
    patch.setattr(Scheduler, "_live", planted)


def a_held_slot_is_given_away(patch: pytest.MonkeyPatch) -> None:
    original = Placement._is_idle

    def planted(self: Placement, slot: Slot, adapter: int) -> bool:
        self._held = {}
        return original(self, slot, adapter)

    patch.setattr(Placement, "_is_idle", planted)


def a_slot_is_given_away_while_it_is_filled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Placement, "_is_idle", lambda self, slot, adapter: slot.adapter not in self.held()
    )


def a_local_prompt_holds_no_slot(patch: pytest.MonkeyPatch) -> None:
    original = DecodeScheduler._slot_holders

    def planted(self: DecodeScheduler) -> Iterable[DecodeReq]:
        return (req for req in original(self) if req not in self.prefilling)

    patch.setattr(DecodeScheduler, "_slot_holders", planted)


def computed_before_the_adapter_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterDesk, "ready", lambda self, req: True)


def adapters_are_told_apart_by_name_alone(patch: pytest.MonkeyPatch) -> None:
    def planted(self: AdapterTable, adapter: Adapter) -> Entry | None:
        return self.named(adapter.name)

    patch.setattr(AdapterTable, "serving", planted)


def memory_is_taken_from_what_is_being_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placement, "_may_go", lambda self, adapter: True)


def a_failed_copy_keeps_its_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterSlots, "release", lambda self, adapter: None)


def an_unload_is_answered_while_it_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placement, "in_use", lambda self: {})


def no_slot_is_kept_for_whom_it_was_filled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slot, "is_kept", property(lambda self: False))


def the_horizon_of_a_drain_does_not_shrink(patch: pytest.MonkeyPatch) -> None:
    def planted(self: Placement, slot: Slot, drain: Any, req: Req) -> bool:
        here = self.held().get(req.lora or 0, ())
        return req.remaining <= max((other.remaining for other in here), default=0)

    patch.setattr(Placement, "_still_admits", planted)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (finished_requests_still_count_as_running, short_race),
        (
            finished_requests_still_count_as_running,
            test_lora_usage.test_a_request_that_finishes_leaves_the_running_ones_in_that_step,
        ),
        (a_held_slot_is_given_away, fuzz),
        (a_slot_is_given_away_while_it_is_filled, fuzz),
        (computed_before_the_adapter_is_there, fuzz),
        (a_local_prompt_holds_no_slot, fuzz),
        (
            adapters_are_told_apart_by_name_alone,
            test_lora_verbs.test_a_name_that_was_unloaded_is_loaded_anew_with_other_content,
        ),
        (
            memory_is_taken_from_what_is_being_copied,
            test_lora_verbs.test_what_is_being_copied_stays_in_memory_though_nobody_uses_it,
        ),
        (a_failed_copy_keeps_its_slot, fuzz),
        (an_unload_is_answered_while_it_is_used, fuzz),
        (
            no_slot_is_kept_for_whom_it_was_filled,
            test_lora_slots.test_a_request_gets_the_slot_that_was_filled_for_it_before_anybody_else_may_take_it,
        ),
        (
            the_horizon_of_a_drain_does_not_shrink,
            test_lora_drain.test_what_is_still_arriving_does_not_stretch_the_horizon,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, plant: Plant, check: Callable[[], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(NOTICED):
        check()
