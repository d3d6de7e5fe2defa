"""Jobs with adapters: which nodes they go to, what they wait for, what happens when none has it."""

import pytest

from common.messages import Adapter, FailureKind
from common.modes import PauseMode
from router.errors import ApiError
from router.node import Loss
from router.replay import ReplayLimits
from router.requests import JobState
from tests.unit.router.desk import Desk, attempt, ear, room

A, B = Adapter("a", "1"), Adapter("b", "1")
OTHER_A = Adapter("a", "2")


def test_both_halves_carry_the_adapter() -> None:
    desk = Desk()
    for node in ("p1", "d1"):
        desk.adapters_of(node, A)
    desk.submit(adapter=A)
    assert desk.generates("p1")[0].adapter == desk.generates("d1")[0].adapter == A


def test_only_nodes_with_that_content_are_asked() -> None:
    desk = Desk("p1 p2 d1 d2 d3")
    desk.adapters_of("p2", A, B)
    desk.adapters_of("d2", OTHER_A)
    desk.adapters_of("d3", A)
    for i in range(4):
        job = desk.submit(f"r{i}", adapter=A)
        assert (attempt(job).computes, attempt(job).decode) == ("p2", "d3")
    assert {attempt(desk.submit(f"s{i}")).decode for i in range(3)} == {"d1", "d2", "d3"}


def test_jobs_whose_nodes_are_full_hold_up_nobody_else() -> None:
    desk = Desk("p1")
    for name, pages in (("d1", 32), ("d2", 1000)):
        desk.join(name, num_pages=pages)
    desk.adapters_of("p1", A)
    desk.adapters_of("d1", A)
    with_adapter = [desk.submit(f"a{i}", max_tokens=400, adapter=A) for i in range(600)]
    base = desk.submit("base")
    assert base.state is JobState.DISPATCHED
    assert attempt(base).decode == "d2"
    waiting = [job for job in with_adapter if job.state is JobState.QUEUED]
    assert len(waiting) > 500
    desk.dispatcher.cancel(with_adapter[0], desk.now)
    assert waiting[0].state is JobState.DISPATCHED  # in their order
    assert waiting[1].state is JobState.QUEUED


def test_a_base_job_that_waits_keeps_its_nodes_from_adapters_behind_it() -> None:
    desk = Desk("p1")
    desk.join("d1", num_pages=64)
    desk.adapters_of("p1", A)
    desk.adapters_of("d1", A)
    first = [desk.submit(f"f{i}", prompt=500, max_tokens=500) for i in range(2)]
    large = desk.submit("large", prompt=500, max_tokens=500)
    small = desk.submit("small", adapter=A)
    assert [job.state for job in (large, small)] == [JobState.QUEUED] * 2
    for job in first:
        desk.dispatcher.cancel(job, desk.now)
    assert [job.state for job in (large, small)] == [JobState.DISPATCHED] * 2


def test_a_job_waits_for_a_node_that_is_being_given_its_adapter() -> None:
    desk = Desk("p1 d1 d2", node_wait_s=5.0)
    desk.adapters_of("p1", A)
    desk.adapters_of("d1", A)
    desk.lose("d1", Loss.UNREACHABLE)
    job = desk.submit(adapter=A)
    desk.tick(2.0)
    assert job.state is JobState.QUEUED
    desk.adapters_of("d2", A)
    assert attempt(job).decode == "d2"


def test_no_node_with_the_adapter_for_too_long_is_503_with_the_reason() -> None:
    desk = Desk("p1 d1", node_wait_s=5.0)
    desk.adapters_of("p1", A)
    job = desk.submit(adapter=A)
    desk.tick()
    desk.tick(4.0)
    assert ear(job).ended is None
    desk.tick(2.0)
    assert (ear(job).ended, ear(job).message) == (
        "503",
        "no decode node that is left has adapter 'a'",
    )


def test_a_queued_job_ends_at_once_when_nobody_is_expected_to_have_its_adapter() -> None:
    desk = Desk("p1 d1")
    desk.adapters_of("p1", A)
    desk.adapters_of("d1", A)
    desk.dispatcher.pause(PauseMode.IN_PLACE, desk.now)
    job, base = desk.submit(adapter=A), desk.submit("base")
    desk.adapters_of("p1")
    desk.tick()
    assert ear(job).ended is None  # decode still has it, and prefill may come to
    desk.adapters_of("d1")
    desk.tick()
    assert ear(job).ended == "404"
    assert ear(base).ended is None


def test_an_arriving_request_is_refused_where_no_pair_has_its_adapter() -> None:
    desk = Desk("p1 d1")
    desk.adapters_of("p1", A)
    with pytest.raises(ApiError) as refused:
        desk.check(adapter=A)
    assert (refused.value.status, refused.value.code) == (503, "adapter_unavailable")
    desk.registry_node("d1").syncing = True  # it may be given it
    desk.check(adapter=A)
    desk.registry_node("d1").syncing = False
    desk.adapters_of("d1", A)
    desk.check(adapter=A)


@pytest.mark.parametrize("how", ["retracted", "died", "failed"])
def test_every_replay_keeps_the_adapter(how: str) -> None:
    desk = Desk("p1 p2 d1 d2")
    for node in ("p1", "p2", "d1", "d2"):
        desk.adapters_of(node, A)
    job = desk.submit(adapter=A)
    decode = attempt(job).decode
    desk.tokens(attempt(job).computes, room(job), 0, 50)
    match how:
        case "retracted":
            desk.retract(decode, room(job))
        case "died":
            desk.lose(decode, Loss.UNREACHABLE)
        case _:
            desk.fail(decode, room(job), FailureKind.TRANSFER)
    desk.tick(2.0)
    again = desk.generates(attempt(job).decode)[-1]
    assert (again.attempt, again.adapter, again.output_ids) == (2, A, [50])


def test_a_node_that_cannot_serve_the_adapter_is_avoided_and_its_reason_is_told_at_last() -> None:
    desk = Desk("p1 d1 d2", replay=ReplayLimits(max_after_fault=2, backoff_s=0.1))
    for node in ("p1", "d1", "d2"):
        desk.adapters_of(node, A)
    job = desk.submit(adapter=A)
    bad = attempt(job).decode
    desk.fail(bad, room(job), FailureKind.ADAPTER)
    desk.tick(1.0)
    assert attempt(job).decode != bad
    for _ in range(2):
        desk.fail(attempt(job).decode, room(job), FailureKind.ADAPTER)
        desk.tick(1.0)
    assert (ear(job).ended, ear(job).message) == ("503", "no node can use the adapter now: why")


def test_unfinished_jobs_of_an_adapter_are_counted_in_every_state() -> None:
    desk = Desk("p1 d1", replay=ReplayLimits(backoff_s=60.0))
    for node in ("p1", "d1"):
        desk.adapters_of(node, A, B)
    count = desk.dispatcher.jobs.of_adapter
    running = desk.submit("x", adapter=A)
    backing_off = desk.submit("y", adapter=A)
    desk.fail("d1", room(backing_off), FailureKind.TRANSFER)
    desk.dispatcher.pause(PauseMode.IN_PLACE, desk.now)
    queued = desk.submit("z", adapter=A)
    desk.submit("other", adapter=B)
    desk.submit("base")
    assert [job.state.value for job in (running, backing_off, queued)] == [
        "dispatched", "backing_off", "queued",
    ]  # fmt: skip
    assert (count("a"), count("b"), count("c")) == (3, 1, 0)
    for left, job in ((2, running), (1, backing_off), (0, queued)):
        desk.dispatcher.cancel(job, desk.now)
        assert count("a") == left
