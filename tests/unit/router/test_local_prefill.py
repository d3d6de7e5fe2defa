"""Attempts on a decode node alone: when, and what becomes of them."""

import pytest

from common.messages import FailureKind, NodeState, StopReason, TokenLogprob
from common.modes import DisaggregationMode
from router.errors import ApiError
from router.local_prefill import LocalLimits
from router.node import Loss
from router.picking import Full, Pair
from router.protocol.terms import Terms
from router.requests import JobState
from tests.unit.router.candidates import candidate, pick
from tests.unit.router.desk import NEVER_LOCAL, Desk, attempt, ear, hello, room

SHORT = LocalLimits(tokens=10, share=0.9)


def nodes_of(desk: Desk, prompt: int, **more: object) -> tuple[str, ...]:
    return attempt(desk.submit(prompt=prompt, **more)).nodes  # type: ignore[arg-type]


# ---------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("known", "overlap", "alone"),
    [
        (10, 0, True),
        (11, 0, False),
        (500, 490, True),
        (500, 489, True),  # 97.8 percent
        (100, 89, False),
        (100, 90, True),
        (800, 720, True),
        (810, 729, False),  # nine tenths, and a rest of 81
        (900, 820, True),
    ],
)
def test_what_is_short_or_mostly_there(known: int, overlap: int, alone: bool) -> None:
    assert SHORT.computes_alone(known, overlap) is alone


def test_limits_may_exclude_it() -> None:
    """A hit never covers the last token, so that a whole prompt is never there."""
    assert not any(NEVER_LOCAL.computes_alone(known, known - 1) for known in range(1, 300))


def test_the_node_that_computes_alone_is_open_large_enough_and_not_blamed() -> None:
    nodes = [candidate("a", capacity=5), candidate("b", is_open=False), candidate("c")]

    def alone(*avoid: str) -> Pair | Full | None:
        return pick([], nodes, avoid=set(avoid), decode_alone=True)

    assert alone() == Pair(None, "c")
    assert alone("c") == Full(frozenset({"b"})), "better wait than fail there again"
    assert alone("b", "c") == Pair(None, "c")
    assert pick([], nodes[:1], decode_alone=True) is None


# ---------------------------------------------------------------- dispatch


def test_a_short_prompt_goes_to_decode_alone_and_a_long_one_to_a_pair() -> None:
    desk = Desk(local=SHORT)
    assert nodes_of(desk, 10) == ("d1",)
    assert nodes_of(desk, 11) == ("p1", "d1")
    generate = desk.generates("d1")[0]
    assert (generate.prefill_incarnation, generate.prefill_address) == ("", "")
    assert len(desk.generates("p1")) == 1
    assert desk.dispatcher.paths == {"local": 1, "disaggregated": 1}


def test_a_probe_and_whoever_wants_prompt_logprobs_go_to_the_pair_if_there_is_one() -> None:
    desk = Desk(local=SHORT, decode_alone=True)
    assert nodes_of(desk, 3, terms=Terms(whole_path=True)) == ("p1", "d1")
    assert nodes_of(desk, 3, prompt_logprobs=0) == ("p1", "d1")
    desk.lose("p1", Loss.SILENT)
    assert nodes_of(desk, 3, terms=Terms(whole_path=True)) == ("d1",)
    assert nodes_of(desk, 3, prompt_logprobs=0) == ("d1",)


def test_decode_alone_tells_everything_once() -> None:
    desk = Desk(local=SHORT)
    job = desk.submit(prompt=9, max_tokens=3)
    desk.tokens("d1", room(job), 0, 50, cached_tokens=4)
    desk.tokens("d1", room(job), 1, 51)
    desk.tokens("d1", room(job), 2, 52, finish=StopReason.LENGTH)
    assert (ear(job).tokens, ear(job).ended, job.cached_tokens) == ([50, 51, 52], "length", 4)
    assert desk.aborts("d1") == []


def test_prompt_logprobs_of_decode_alone_come_with_its_first_token() -> None:
    desk = Desk("d1", decode_alone=True)
    job = desk.submit(prompt=3, prompt_logprobs=0)
    scores = [TokenLogprob(-1.0), TokenLogprob(-2.0)]
    desk.tokens("d1", room(job), 0, 50, prompt_logprobs=scores)
    desk.tokens("d1", room(job), 1, 51)
    assert ear(job).tokens == [50, 51]


def test_who_waits_to_be_computed_counts_as_load_and_as_tokens_ahead() -> None:
    desk = Desk("d1", decode_alone=True)

    def load() -> float:
        desk.dispatcher._load.settle(0.0)
        return desk.dispatcher._load.candidate(desk.registry_node("d1")).load

    job = desk.submit(prompt=30, max_tokens=8)
    assert load() == 38 + 30
    assert desk.dispatcher.backlog().queued_tokens == 30
    desk.tokens("d1", room(job), 0, 50)
    assert load() == 38
    assert desk.dispatcher.backlog().queued_tokens == 0
    desk.dispatcher.cancel(job, desk.now)
    assert load() == 0


def test_a_decode_node_is_given_no_more_prompts_than_it_soon_computes() -> None:
    desk = Desk("", decode_alone=True)
    desk.join("d1", num_pages=2000)
    jobs = [desk.submit(prompt=500) for _ in range(5)]
    assert [job.state for job in jobs] == [JobState.DISPATCHED] * 3 + [JobState.QUEUED] * 2
    desk.tokens("d1", room(jobs[0]), 0, 50)
    assert jobs[3].state is JobState.DISPATCHED


def test_short_prompts_that_decode_has_enough_of_go_to_the_pair() -> None:
    desk = Desk("", local=LocalLimits(tokens=600))
    desk.join("d1", num_pages=2000)
    desk.join("p1", num_pages=2000)
    assert [nodes_of(desk, 500) for _ in range(4)] == [("d1",)] * 3 + [("p1", "d1")]


# ---------------------------------------------------------------- without prefill nodes


def test_requests_go_on_where_no_prefill_node_is_left_and_back_when_one_joins() -> None:
    desk = Desk("p1 d1", decode_alone=True)
    job = desk.submit(prompt=30)
    assert attempt(job).nodes == ("p1", "d1")
    desk.lose("p1", Loss.UNREACHABLE)
    assert attempt(job).nodes == ("d1",), "the attempt died with it"
    desk.lose("p1", Loss.SILENT)
    assert nodes_of(desk, 30) == ("d1",)
    desk.join("p2")
    assert nodes_of(desk, 30) == ("p2", "d1")
    assert attempt(job).nodes == ("d1",)


def test_what_decode_computes_does_not_depend_on_the_prefill_node_that_went() -> None:
    desk = Desk("p1 d1", local=SHORT)
    job = desk.submit(prompt=5)
    desk.lose("p1", Loss.SILENT)
    assert attempt(job).nodes == ("d1",)
    assert job.attempts == 1


def test_a_paused_prefill_node_is_waited_for() -> None:
    desk = Desk("p1 d1", decode_alone=True)
    desk.set_state("p1", NodeState.PAUSED)
    job = desk.submit(prompt=30)
    assert job.state is JobState.QUEUED
    desk.set_state("p1", NodeState.READY)
    assert attempt(job).nodes == ("p1", "d1")


def test_a_leaving_prefill_node_is_not() -> None:
    desk = Desk("p1 d1", decode_alone=True)
    desk.set_state("p1", NodeState.DRAINING)
    assert nodes_of(desk, 30) == ("d1",)


def test_a_prefill_node_of_another_kind_of_pages_is_none() -> None:
    desk = Desk("d1", decode_alone=True)
    desk.join("p1", page_size=32)
    assert nodes_of(desk, 30) == ("d1",)


def test_when_every_prefill_node_has_failed_the_request_decode_computes_it() -> None:
    desk = Desk("p1 p2 d1", decode_alone=True)
    job = desk.submit(prompt=30)
    for _ in range(2):
        first = attempt(job).computes
        desk.fail("d1", room(job), FailureKind.PEER_LOST)
        assert first in job.avoid
        desk.tick(1.0)
    assert attempt(job).nodes == ("d1",)
    assert nodes_of(desk, 30) in {("p1", "d1"), ("p2", "d1")}, "others are none the wiser"


def test_without_the_flag_nobody_computes_alone_what_is_long() -> None:
    desk = Desk("d1", local=SHORT)
    with pytest.raises(ApiError, match="no prefill node"):
        desk.check(30)
    assert "prefill" in (desk.registry.unready() or "")


def test_with_the_flag_it_is_accepted_ready_and_as_large_as_decodes_pool() -> None:
    desk = Desk("d1", decode_alone=True)
    desk.check(30)
    assert desk.registry.fleet.missing() is None
    assert desk.registry.unready() is None
    assert desk.registry.fleet.capacity_tokens() == 64 * 16
    desk.say("p1", hello(DisaggregationMode.PREFILL, "p1", num_pages=8), to="", seq=1)
    assert desk.registry.unready() is None, "one that has not told its adapters is none yet"
    desk.adapters_of("p1")
    assert desk.registry.fleet.capacity_tokens() == 8 * 16
    assert "shaken hands" in (desk.registry.unready() or "")


def test_no_decode_node_is_still_nobody() -> None:
    desk = Desk("p1", decode_alone=True, local=SHORT)
    with pytest.raises(ApiError, match="no decode node"):
        desk.check(5)


def test_a_lone_decode_node_that_dies_is_replayed_elsewhere() -> None:
    desk = Desk("d1 d2", decode_alone=True)
    job = desk.submit(prompt=30, max_tokens=4)
    (victim,) = attempt(job).nodes
    desk.tokens(victim, room(job), 0, 50)
    desk.lose(victim, Loss.UNREACHABLE)
    (other,) = attempt(job).nodes
    assert other != victim
    assert desk.generates(other)[-1].output_ids == [50]
    desk.retract(other, room(job))
    assert job.state is JobState.DISPATCHED


def test_the_pace_is_measured_of_lone_decode_nodes_too() -> None:
    desk = Desk("d1", decode_alone=True)
    for _ in range(40):
        job = desk.submit(prompt=400, max_tokens=2)
        other = desk.submit(prompt=400, max_tokens=2)
        desk.now += 0.1
        for one in (job, other):
            desk.tokens("d1", room(one), 0, 50)
            desk.dispatcher.cancel(one, desk.now)
            desk.settle()
    pace = desk.dispatcher.intake.admission.prefill_tokens_per_s
    assert pace == pytest.approx(4000), "of the two, the first ends the time with enough to do"
