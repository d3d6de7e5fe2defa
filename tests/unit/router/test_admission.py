"""Who is refused, why, and when it should come back."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages import NodeState, SamplingParams, StopReason
from common.modes import PauseMode
from router.admission import (
    MAX_RETRY_S,
    Admission,
    AdmissionLimits,
    Backlog,
    Demand,
    Refusal,
)
from router.errors import ApiError
from router.prepared import ChoiceSpec
from router.protocol.terms import Terms
from router.rates import RateMeter
from router.requests import HEADROOM_TOKENS, Job, JobState
from router.text_stream import TextOptions
from tests.unit.router.desk import Desk, attempt, ear, room


def refused(call: Callable[[], None]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value


def limits(**settings: object) -> AdmissionLimits:
    return AdmissionLimits(**settings)  # type: ignore[arg-type]


def busy(**settings: object) -> Desk:
    """One pair whose prefill has enough to do: what comes now waits at the router."""
    desk = Desk(admission=limits(**settings))
    for i in range(2):
        desk.submit(f"first{i}", prompt=600)
    return desk


def finish(desk: Desk, job: Job) -> None:
    desk.tokens("d1", room(job), 0, 50, finish=StopReason.STOP)


def check(admission: Admission, demand: Demand, backlog: Backlog, now: float = 1.0) -> None:
    admission.check_work(demand, backlog, now)


# ---------------------------------------------------------------- the measure


def test_a_pace_is_that_of_busy_time_alone() -> None:
    meter = RateMeter()
    meter.add(1000, 1.0)  # not running: nothing is known of how long it took
    assert meter.per_second is None
    meter.run(True, 10.0)
    meter.add(100, 11.0)
    assert meter.per_second == pytest.approx(100)
    meter.run(False, 11.0)
    meter.run(True, 500.0)
    meter.add(100, 501.0)
    assert meter.per_second == pytest.approx(100)


def test_a_pace_follows_a_change_and_a_long_piece_is_no_standstill() -> None:
    meter = RateMeter()
    meter.run(True, 0.0)
    for i in range(1, 200):
        meter.add(10, i * 0.1)
    assert meter.per_second == pytest.approx(100)
    before = meter.per_second
    meter.run(True, 60.0)  # forty seconds without a result yet
    assert meter.per_second == before
    now = 20.0
    for _ in range(300):
        now += 0.5
        meter.add(10, now)
    assert meter.per_second == pytest.approx(20, rel=0.05)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 10**6)), min_size=1))
def test_a_pace_lies_between_the_slowest_and_the_fastest(pieces: list[tuple[float, int]]) -> None:
    meter, now = RateMeter(), 0.0
    meter.run(True, now)
    for seconds, amount in pieces:
        now += seconds
        meter.add(amount, now)
    if meter.per_second is not None and all(seconds > 1e-3 for seconds, _ in pieces):
        paces = [amount / seconds for seconds, amount in pieces]
        assert min(paces) * 0.999 <= meter.per_second <= max(paces) * 1.001


# ---------------------------------------------------------------- each bound


def backlog(**numbers: object) -> Backlog:
    plain: dict[str, object] = {
        "tokens_ahead": 0, "queued_tokens": 0, "held_tokens": 0, "decode_tokens": 1000,
        "num_computing": 1,
    }  # fmt: skip
    return Backlog(**(plain | numbers))  # type: ignore[arg-type]


def test_the_number_of_choices_is_bounded() -> None:
    admission = Admission(limits(max_requests=4))
    admission.check_count(2, 1.0, choices=2)
    error = refused(lambda: admission.check_count(2, 1.0, choices=3))
    assert (error.status, error.code, error.retry_after_s) == (429, "overloaded", 1)
    assert "2 requests are unfinished" in error.message
    assert admission.refused == {Refusal.REQUESTS: 1}


def test_queued_tokens_are_bounded_for_each_prefill_node_before_any_pace_is_known() -> None:
    admission = Admission(limits(max_queued_tokens=1000))
    check(admission, Demand(prompt_tokens=200), backlog(queued_tokens=800))
    check(admission, Demand(prompt_tokens=1200), backlog(queued_tokens=800, num_computing=2))
    error = refused(lambda: check(admission, Demand(prompt_tokens=201), backlog(queued_tokens=800)))
    assert "800 prompt tokens wait" in error.message
    check(admission, Demand(prompt_tokens=5000), backlog(queued_tokens=0))  # or it never could be


def test_the_wait_is_bounded_once_the_pace_is_known() -> None:
    admission = Admission(limits(max_queue_s=10.0))
    ahead = backlog(tokens_ahead=1500, queued_tokens=1500)
    check(admission, Demand(), ahead)
    admission.note_work(queued=True, unfinished=True, now=0.0)
    admission.note_prefilled(100, 100, 1.0)
    error = refused(lambda: check(admission, Demand(), ahead))
    assert "would be 15 s" in error.message
    assert error.retry_after_s == 5  # then ten seconds of work are left
    check(admission, Demand(), backlog(tokens_ahead=900, queued_tokens=10**5))


def test_wanted_kv_is_compared_with_what_decode_nodes_hold() -> None:
    admission = Admission(limits(max_kv_oversubscription=2.0))
    admission.note_work(queued=True, unfinished=True, now=0.0)
    admission.note_end(100, 1.0)
    check(admission, Demand(kv_tokens=500), backlog(held_tokens=1500))
    error = refused(lambda: check(admission, Demand(kv_tokens=800), backlog(held_tokens=1500)))
    assert error.retry_after_s == 3
    assert admission.refused == {Refusal.KV: 1}


def test_what_can_start_at_once_is_not_refused() -> None:
    desk = Desk(
        admission=limits(max_requests=4, max_queued_tokens=1, max_kv_oversubscription=0.001)
    )
    running = desk.submit("running", prompt=60)
    assert running.state is JobState.DISPATCHED
    much = Demand(prompt_tokens=10**6, kv_tokens=10**6)
    desk.dispatcher.check_room_for(much, 0, desk.now)
    error = refused(lambda: desk.dispatcher.check_room_for(Demand(choices=4), 0, desk.now))
    assert "1 requests are unfinished" in error.message  # the number counts also then
    desk.submit("second", prompt=600)
    desk.submit("third", prompt=600)
    refused(lambda: desk.dispatcher.check_room_for(much, 0, desk.now))


@given(st.integers(1, 10**9), st.floats(0.001, 10**6))
def test_retry_after_is_a_bounded_whole_number(tokens: int, seconds: float) -> None:
    admission = Admission(limits(max_queued_tokens=1))
    admission.note_work(queued=True, unfinished=True, now=0.0)
    admission.note_prefilled(50, 50, seconds)
    error = refused(lambda: check(admission, Demand(), backlog(queued_tokens=tokens + 1)))
    assert isinstance(error.retry_after_s, int)
    assert 1 <= error.retry_after_s <= MAX_RETRY_S


def test_those_refused_are_given_turns_at_the_pace_of_the_ends() -> None:
    """Three times capacity: two of three are refused, and all of them will be back."""
    admission = Admission(limits(max_requests=1))
    admission.note_work(queued=True, unfinished=True, now=0.0)
    for i in range(1, 101):
        admission.note_end(1, i * 0.1)  # ten a second

    def retry_s(now: float) -> int | None:
        return refused(lambda: admission.check_count(1, now)).retry_after_s

    told = [retry_s(10.0) for _ in range(40)]
    assert told[0] == 1
    assert told[-1] == 4  # 39 before it and the one in excess, ten a second
    assert all(told.count(second) <= 11 for second in set(told))
    assert retry_s(14.0) == 1  # they had their turns
    for _ in range(10_000):
        last = retry_s(14.0)
    assert last == MAX_RETRY_S


def test_a_batch_asks_for_all_its_choices() -> None:
    few, many = SamplingParams(max_tokens=4, seed=1), SamplingParams(max_tokens=4000, seed=1)
    text = TextOptions()
    demand = Demand.of([ChoiceSpec([1, 2], few, text), ChoiceSpec([1, 2, 3], many, text)])
    assert demand == Demand(choices=2, prompt_tokens=5, kv_tokens=6 + 3 + HEADROOM_TOKENS)


# ---------------------------------------------------------------- in the dispatcher


def test_the_wait_counts_the_queue_and_the_nodes() -> None:
    desk = busy()
    queued = [desk.submit(f"q{i}", prompt=100) for i in range(5)]
    assert {job.state for job in queued} == {JobState.QUEUED}
    assert desk.dispatcher.backlog().queued_tokens == 1200 + 500
    desk.dispatcher.cancel(queued[0], desk.now)
    assert desk.dispatcher.backlog().queued_tokens == 1200 + 400
    desk.tokens("p1", room(desk.dispatcher.unfinished()[0]), 0, 50)
    assert desk.dispatcher.backlog().queued_tokens == 600 + 400


def test_a_request_waits_only_behind_its_own_priority() -> None:
    desk = busy(max_queue_s=10.0)
    for i in range(20):
        desk.submit(f"q{i}", prompt=100, terms=Terms(priority=5))
    desk.now += 6.0
    desk.tokens("p1", room(desk.dispatcher.unfinished()[0]), 0, 50)  # 600 tokens in 6 s
    assert refused(lambda: desk.check(priority=5)).status == 429
    desk.check(priority=4)


def test_accepted_work_is_never_refused_by_admission_again() -> None:
    desk = busy(max_requests=3, max_queue_s=0.001, max_queued_tokens=1)
    job = desk.submit("mine", prompt=100)
    assert refused(desk.check).status == 429
    for first in desk.dispatcher.unfinished()[:2]:
        desk.now += 3.0
        finish(desk, first)
    for _ in range(3):
        desk.retract("d1", room(job))
        assert job.state is JobState.DISPATCHED
    finish(desk, job)
    assert ear(job).ended == "stop"


def test_a_pause_is_no_standstill_and_does_not_spoil_the_pace() -> None:
    desk = busy()
    first, second = desk.dispatcher.unfinished()
    desk.now += 6.0
    desk.tokens("p1", room(first), 0, 50)
    pace = desk.dispatcher.intake.admission.prefill_tokens_per_s
    desk.dispatcher.pause(PauseMode.IN_PLACE, desk.now)
    desk.tick()
    desk.now += 1000.0
    desk.dispatcher.resume(desk.now)
    desk.now += 6.0
    desk.tokens("p1", room(second), 0, 50)
    assert desk.dispatcher.intake.admission.prefill_tokens_per_s == pytest.approx(pace)


@pytest.mark.parametrize("name", ["p1", "d1"])
def test_it_is_503_when_all_nodes_of_a_role_drain(name: str) -> None:
    desk = busy(max_queued_tokens=1)
    desk.set_state(name, NodeState.DRAINING)
    error = refused(desk.check)
    assert error.status == 503
    assert ("prefill" if name == "p1" else "decode") in error.message
    assert desk.dispatcher.intake.admission.refused == {Refusal.NO_NODE: 1}


def test_overload_never_makes_a_node_count_as_lost() -> None:
    """A full node is not asked, a refusing one is asked again later; both stay in the cluster."""
    desk = busy(max_requests=50)
    jobs = [desk.submit(f"q{i}", prompt=100) for i in range(40)]
    for _ in range(100):  # ten seconds of full nodes that say so
        desk.beat("p1", queued_tokens=10**6, queues={"waiting": 10**4})
        desk.beat("d1", queued_tokens=10**6, queues={"running": 10**4})
        desk.tick(0.1)
        assert desk.registry.expire(desk.now) == []
    assert desk.registry.fleet.missing() is None
    assert all(ear(job).ended is None for job in jobs)
    assert sum(desk.dispatcher.replays.values()) == 0
    desk.beat("p1")
    desk.beat("d1")
    while len(desk.dispatcher):
        for job in [job for job in desk.dispatcher.unfinished() if job.attempt is not None]:
            assert attempt(job).computes == "p1"
            finish(desk, job)
    assert {ear(job).ended for job in jobs} == {"stop"}
