"""A step is decided while the one before it is in flight: what it may say, and what stays held."""

from typing import Any

import pytest

from common.lifecycle import State
from common.messages import (
    Abort,
    Failed,
    FailureKind,
    Grammar,
    GrammarKind,
    Retracted,
    RoomFailed,
    SamplingParams,
    StopReason,
    TokenOutput,
    Tokens,
)
from common.modes import PauseMode
from common.plan import GrammarCompiled, PlaceAdapter, Row, Write, WriteDone
from decode_node.request import DecodeReq
from tests.unit.scheduler.harness import (
    Driven,
    adapter,
    decode,
    destination,
    generate,
    landed,
    prefill,
    running,
)

STOP = 9


def rows(node: Driven) -> list[Row]:
    """What the next step is decided to be, with whatever is in flight."""
    batch = node.decide().batch
    return [] if batch is None else list(batch.rows)


def outputs(node: Driven) -> list[TokenOutput]:
    return [output for tokens in node.said(Tokens) for output in tokens.outputs]


def in_flight(*rooms: int, **fields: Any) -> tuple[Driven, Any]:
    """A decode node with a step of these rooms in flight; two of their outputs are known."""
    node = decode(**fields.pop("node", {}))
    running(node, *rooms, **fields)
    return node, node.decide().batch


# ---------------------------------------------------------------- what the next step says


def test_the_next_row_goes_on_from_what_the_slot_draws() -> None:
    node, first = in_flight(1)
    (row,), (ahead,) = first.rows, rows(node)
    assert not row.from_slot
    assert ahead.from_slot
    assert (ahead.slot, ahead.start, ahead.sample_index) == (row.slot, row.start + 1, 3)
    assert len(ahead.token_ids) == 1
    node.take_in(first, token=7)
    node.decide()
    assert [(out.index, out.token_ids) for out in outputs(node)] == [(0, [3]), (1, [5]), (2, [7])]


def test_it_takes_the_page_that_the_token_in_flight_will_need() -> None:
    node, first = in_flight(1)  # 6 prompt tokens, two outputs known, the third in flight
    (row,) = rows(node)
    assert (first.rows[0].start, first.rows[0].new_pages) == (7, ())
    assert row.start == 8
    assert len(row.new_pages) == 1


def test_who_draws_the_last_token_in_flight_gets_no_further_row() -> None:
    node, first = in_flight(1, 2, max_tokens=3)
    assert len(first.rows) == 2
    assert rows(node) == []
    node.take_in(first)
    node.decide()
    assert [out.finish for out in outputs(node)][-2:] == [StopReason.LENGTH] * 2
    assert node.scheduler.counters["wasted_rows"] == 0
    assert node.scheduler.kv.num_free == 24


def test_a_prompts_next_chunk_begins_where_the_one_in_flight_ends() -> None:
    node = prefill()
    node.router(generate(1, prompt=14))
    node.peer(destination(1, pages=4), "d")
    first = node.decide().batch
    assert first is not None
    (row,) = rows(node)
    assert (row.start, list(row.token_ids)) == (6, list(range(6, 12)))
    assert (row.new_pages, row.init) == ((), None)
    assert node.sent(Write) == [], "nothing is written before it is known to be computed"
    node.take_in(first)
    (last,) = rows(node)
    assert (last.start, last.sample_index) == (12, 0)
    assert [write.source_pages for write in node.sent(Write)] == [(0,)]


def test_nothing_comes_behind_the_last_chunk_in_flight() -> None:
    node = prefill()
    node.router(generate(1))
    node.peer(destination(1), "d")
    assert len(rows(node)) == 1
    assert rows(node) == []


def test_a_prompt_computed_here_runs_once_its_first_token_is_known() -> None:
    node = decode()
    node.router(generate(1, prefill_incarnation="", prefill_address=""))
    first = node.decide().batch
    assert rows(node) == []
    node.take_in(first)
    (row,) = rows(node)
    assert not row.from_slot


@pytest.mark.parametrize(
    "wish",
    [
        {"logprobs": 0}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1}, {"logit_bias": {3: 1.0}}, {"min_tokens": 8},
        {"grammar": Grammar(GrammarKind.REGEX, "a+")},
    ],
)  # fmt: skip
def test_what_the_host_draws_is_awaited(wish: dict[str, Any]) -> None:
    node = decode()
    sampling = SamplingParams(max_tokens=8, seed=1, **wish)
    running(node, 1)
    node.router(generate(2, sampling=sampling))
    node.scheduler.on_grammar(GrammarCompiled(2), node.now)
    node.step()
    plain = node.decide().batch
    assert node.scheduler.may_run_ahead
    node.fact(landed(2))
    assert len(rows(node)) == 2
    node.take_in(plain)
    assert not node.scheduler.may_run_ahead


@pytest.mark.parametrize("wish", [{}, {"temperature": 0.0}, {"top_k": 5, "min_p": 0.1}])
def test_what_the_device_draws_is_not(wish: dict[str, Any]) -> None:
    node, _ = in_flight(1, sampling=SamplingParams(max_tokens=8, seed=1, **wish))
    assert node.scheduler.may_run_ahead


def test_min_tokens_are_a_matter_of_the_host_only_while_they_count() -> None:
    sampling = SamplingParams(max_tokens=8, seed=1, min_tokens=3)
    node, first = in_flight(1, sampling=sampling)
    assert not node.scheduler.may_run_ahead
    node.take_in(first)
    node.decide()
    assert node.scheduler.may_run_ahead


def test_a_scored_prompt_is_awaited() -> None:
    node = prefill()
    scored = SamplingParams(max_tokens=8, seed=1, prompt_logprobs=0)
    node.router(generate(1, prompt=14, sampling=scored))
    node.peer(destination(1, pages=4), "d")
    assert node.decide().batch is not None
    assert not node.scheduler.may_run_ahead


def test_no_more_than_two_steps_are_in_flight() -> None:
    node, _ = in_flight(1)
    node.decide()
    assert not node.scheduler.may_run_ahead
    with pytest.raises(AssertionError, match="was not taken in"):
        node.decide()


# ---------------------------------------------------------------- what ends meanwhile


def test_a_stop_token_costs_one_row_whose_result_is_thrown_away() -> None:
    node, first = in_flight(1, stop=(STOP,))
    wasted = node.decide().batch
    assert wasted is not None
    node.take_in(first, token=STOP)
    assert node.scheduler.running_batch == ()
    assert node.scheduler.kv.num_free < 24, "a step in flight writes into its pages"
    assert not node.scheduler.is_empty
    assert node.decide().batch is None
    assert outputs(node)[-1].finish is StopReason.STOP
    node.take_in(wasted, token=7)
    node.decide()
    assert outputs(node)[-1].finish is StopReason.STOP, "and nothing behind it"
    assert node.scheduler.counters["wasted_rows"] == 1
    assert node.scheduler.kv.num_free == 24
    assert node.scheduler.is_empty


def test_an_abort_is_heard_at_once_and_gives_back_what_is_in_flight_later() -> None:
    node, first = in_flight(1, 2)
    second = node.decide().batch
    assert second is not None
    node.router(Abort(1))
    (held,) = node.scheduler._flight.lingering
    assert held.pages
    assert held.slot is not None
    node.take_in(first)
    assert (held.slot, bool(held.pages)) == (first.rows[0].slot, True)
    node.take_in(second)
    assert (held.slot, held.pages) == (None, [])
    assert [req.room for req in node.scheduler.running_batch] == [2]
    assert node.scheduler.counters["wasted_rows"] == 2


def test_a_slot_in_flight_has_no_new_owner() -> None:
    node, first = in_flight(1, node={"max_running_requests": 1})
    second = node.decide().batch
    node.router(generate(2))
    node.router(Abort(1))
    node.take_in(first)
    node.step()
    node.fact(landed(2))
    assert node.decide().batch is None
    node.take_in(second)
    (row,) = rows(node)
    assert row.init is not None


def test_a_posted_write_and_a_step_hold_the_same_pages() -> None:
    """On prefill: whichever of the two ends last gives them back."""
    for step_first in (True, False):
        node = prefill()
        node.router(generate(1, prompt=20))
        node.peer(destination(1, pages=5), "d")
        node.step()
        second = node.decide().batch
        assert len(node.sent(Write)) == 1
        node.router(Abort(1))
        assert [req.room for req in node.scheduler.queues[State.ABORTING]] == [1]
        write_ends = WriteDone(1, 0, 1, 0.1)
        if not step_first:
            node.fact(write_ends)
        node.decide()
        assert bool(node.said(RoomFailed)) is not step_first, "decode's pages are free already"
        assert node.scheduler.kv.num_free < 24
        node.take_in(second)
        assert (node.scheduler.kv.num_free < 24) is step_first
        node.fact(write_ends)
        node.step()
        assert len(node.said(RoomFailed)) == 1
        assert node.scheduler.kv.num_free == 24
        assert node.scheduler.is_empty


def test_an_adapters_slot_is_not_filled_anew_under_a_step_in_flight() -> None:
    node = decode(max_loras_per_batch=1)
    node.serve("a", "b")
    node.loader()
    running(node, 1, adapter=adapter("a"))
    while not node.scheduler.running_batch:
        node.loader()
        node.step()
    second = node.decide().batch
    assert second is not None
    assert second.rows[0].lora_slot == 0
    node.router(Abort(1))
    node.router(generate(2, adapter=adapter("b"), prefill_incarnation="", prefill_address=""))
    node.commands.clear()
    node.decide()
    assert not [c for c in node.commands if isinstance(c, PlaceAdapter)]
    node.take_in(second)
    node.decide()
    assert [c for c in node.commands if isinstance(c, PlaceAdapter)]


def test_a_failed_step_fails_its_requests_once() -> None:
    node, _ = in_flight(1, 2)
    second = node.decide().batch
    node.scheduler.process_batch_failure("out of luck", node.now)
    node.scheduler.check_invariants()
    node.take_in(second)
    node.step()
    assert node.failures(FailureKind.ENGINE) == [1, 2]
    assert len(node.said(Failed)) == 2
    assert node.scheduler.is_empty


# ---------------------------------------------------------------- memory pressure


def test_nobody_is_retracted_while_a_step_is_in_flight() -> None:
    """What a victim has would not be free yet, so the next would be retracted as well."""
    node = decode(num_pages=13)
    running(node, 1, 2, 3, max_tokens=16)
    before = node.decide().batch
    for _ in range(30):
        batch = node.decide().batch
        if before is not None:
            node.take_in(before)
        before = batch
    assert [retracted.room for retracted in node.said(Retracted)] == [3]
    assert [out.room for out in outputs(node) if out.finish is not None] == [1, 2]


def test_what_a_leaving_node_hands_over_keeps_its_pages_until_the_step_is_taken_in() -> None:
    node, first = in_flight(1, 2)
    second = node.decide().batch
    node.scheduler.leave.begin(node.now)
    node.now += 10.0
    node.take_in(first)
    assert node.decide().batch is None
    assert [retracted.room for retracted in node.said(Retracted)] == [1, 2]
    assert not node.scheduler.is_empty
    node.take_in(second)
    assert node.scheduler.is_empty


def test_requests_in_flight_stay_where_they_are_through_a_pause_in_place() -> None:
    """The loop takes in what is in flight before it pauses; then everything is as without."""
    node, first = in_flight(1)
    node.take_in(first)
    node.scheduler.pause_generation(PauseMode.IN_PLACE)
    assert node.decide().batch is None
    node.scheduler.continue_generation()
    (row,) = rows(node)
    (req,) = node.scheduler.running_batch
    assert isinstance(req, DecodeReq)
    assert (row.from_slot, list(row.token_ids)) == (False, [req.output_ids[-1]])
