"""Steps decided ahead, under everything that can happen: nothing changes but when it is known.

The modelled runner computes a step as late as its result is wanted, or at once, by chance: what
comes into its memory meanwhile is there before the step, or behind it.
"""

from collections.abc import Callable
from typing import Any

import pytest

from common.flight import Flight
from common.lifecycle import R
from common.request import Req
from common.steps import Steps
from decode_node.scheduler import DecodeScheduler
from tests.unit import test_event_loop_ahead
from tests.unit.scheduler import test_fuzz, test_lora_fuzz, test_overlap
from tests.unit.scheduler.client import ModelRouter
from tests.unit.scheduler.real_router import RealRouter
from tests.unit.scheduler.test_fuzz import Router
from tests.unit.scheduler.test_planted import NOTICED

SEEDS = 100
LORA_SEEDS = 50


@pytest.mark.parametrize("router", [ModelRouter, RealRouter])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_or_leaked(seed: int, router: Router) -> None:
    test_fuzz.run(seed, router=router, overlap=True)


@pytest.mark.parametrize("router", [ModelRouter, RealRouter])
@pytest.mark.parametrize("seed", range(LORA_SEEDS))
def test_no_text_is_computed_with_another_adapter(seed: int, router: Router) -> None:
    test_lora_fuzz.run(seed, router=router, overlap=True)


def test_the_fuzz_reaches_what_it_is_for() -> None:
    """Requests go on ahead, end under steps in flight, and are retracted, all the same."""
    seen: dict[str, int] = {}
    guessed = 0
    for seed in range(30):
        for node in test_fuzz.run(seed, overlap=True).nodes.values():
            guessed += node.runner.guessed
            for name, count in node.scheduler.counters.items():
                seen[name] = seen.get(name, 0) + count
    assert guessed > seen["generated_tokens"] / 3, (guessed, seen)
    for name in ("wasted_rows", "retractions", "failed_steps", "local_prefill_tokens"):
        assert seen.get(name, 0) > 20, (name, seen)


# ---------------------------------------------------------------- planted faults


def fuzz() -> None:
    for seed in range(150):
        test_fuzz.run(seed, overlap=True)


def fuzz_with_grammars() -> None:
    for seed in range(20):
        test_fuzz.run(seed, router=RealRouter, overlap=True)


Plant = Callable[[pytest.MonkeyPatch], None]


def pages_are_given_back_under_a_step_in_flight(patch: pytest.MonkeyPatch) -> None:
    def planted(self: Flight[R], req: R) -> None:
        self._lingering.pop(req, None)
        self._slots.take_back(req)
        self._kv.release(req)

    patch.setattr(Flight, "release", planted)


def a_wasted_rows_token_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("common.scheduler.is_over", lambda req: False)


def it_runs_ahead_of_what_the_host_draws(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flight, "may_run_ahead", property(lambda self: len(self) < 2))


def a_row_goes_beyond_the_last_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Req, "draws_its_last", property(lambda self: False))


def the_token_in_flight_needs_no_room(patch: pytest.MonkeyPatch) -> None:
    original = DecodeScheduler._make_room

    def planted(self: DecodeScheduler, req: Any) -> bool:
        drawing, req.drawing = req.drawing, 0
        made = original(self, req)
        req.drawing = drawing
        return made

    patch.setattr(DecodeScheduler, "_make_room", planted)


def requests_are_retracted_under_a_step_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeScheduler, "_is_short_of_pages", lambda self: False)


def what_lingers_needs_no_adapter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("common.scheduler.chain", lambda requests, lingering: requests)


def a_chunk_is_computed_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Req, "num_unplanned", property(lambda self: self.num_uncomputed))


def control_messages_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Steps, "land", lambda self: None)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (pages_are_given_back_under_a_step_in_flight, fuzz),
        (a_wasted_rows_token_counts, fuzz),
        (it_runs_ahead_of_what_the_host_draws, fuzz_with_grammars),
        (a_row_goes_beyond_the_last_token, fuzz),
        (the_token_in_flight_needs_no_room, fuzz),
        (
            requests_are_retracted_under_a_step_in_flight,
            test_overlap.test_nobody_is_retracted_while_a_step_is_in_flight,
        ),
        (
            what_lingers_needs_no_adapter,
            test_overlap.test_an_adapters_slot_is_not_filled_anew_under_a_step_in_flight,
        ),
        (a_chunk_is_computed_twice, fuzz),
        (control_messages_do_not_wait, fuzz),
        (
            control_messages_do_not_wait,
            test_event_loop_ahead.test_a_retract_pause_hands_back_what_was_in_flight_and_keeps_no_page,
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
