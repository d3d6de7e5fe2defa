"""How attempts and requests end at the router: losses, waits, aborts, pauses."""

import pytest

from common.messages import Failed, FailureKind, NodeState, StopReason
from common.modes import PauseMode
from router.errors import unavailable
from router.node import Loss
from router.replay import ReplayLimits
from router.requests import EDGES, IllegalTransition, JobState
from tests.unit.router.desk import Desk, attempt, ear, room

RETRYABLE = [
    FailureKind.TRANSFER,
    FailureKind.EXPIRED,
    FailureKind.PEER_LOST,
    FailureKind.REFUSED,
    FailureKind.ENGINE,
]

# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("loss", list(Loss))
def test_prefill_lost_after_decode_has_spoken_is_no_loss(loss: Loss) -> None:
    desk = Desk()
    job = desk.submit()
    desk.tokens("d1", room(job), 0, 50)
    desk.lose("p1", loss)
    assert len(desk.generates("d1")) == 1
    desk.tokens("d1", room(job), 1, 51, finish=StopReason.STOP)
    assert ear(job).tokens == [50, 51]


def test_a_prefill_that_left_has_finished_what_it_did_not_give_back() -> None:
    desk = Desk("p1 p2 d1")
    computed, not_begun = desk.submit("a"), desk.submit("b")
    leaving = attempt(computed).computes
    if attempt(not_begun).computes != leaving:
        not_begun = desk.submit("c")
    assert attempt(not_begun).computes == leaving
    desk.tokens(leaving, room(computed), 0, 50)
    old = room(computed)
    desk.lose(leaving, Loss.LEFT)
    assert room(computed) == old
    assert attempt(not_begun).computes != leaving
    desk.tokens("d1", old, 0, 50, 51, finish=StopReason.STOP)
    assert ear(computed).ended == "stop"


def test_prefill_dies_after_the_first_token_and_nothing_is_lost_or_doubled() -> None:
    desk = Desk("p1 d1")
    job = desk.submit()
    old = room(job)
    desk.tokens("p1", old, 0, 50)
    desk.lose("p1", Loss.SILENT)
    assert desk.aborts("d1") == [old]
    assert job.state is JobState.QUEUED
    desk.join("p2")
    assert desk.generates("p2")[0].output_ids == [50]
    desk.tokens("p2", room(job), 1, 51)
    desk.tokens("d1", room(job), 1, 51, 52)
    assert ear(job).tokens == [50, 51, 52]


def test_a_dead_decode_is_replaced_by_another() -> None:
    desk = Desk("p1 d1 d2")
    job = desk.submit()
    dead = attempt(job).decode
    desk.tokens(dead, room(job), 0, 50, 51)
    desk.lose(dead, Loss.SILENT)
    assert attempt(job).decode != dead
    assert desk.generates(attempt(job).decode)[-1].output_ids == [50, 51]


def test_a_request_that_kills_nodes_is_not_tried_for_ever() -> None:
    desk = Desk("p1 d1 d2 d3 d4")
    job = desk.submit()
    desk.lose(attempt(job).decode, Loss.UNREACHABLE)
    desk.lose(attempt(job).decode, Loss.UNREACHABLE)  # the first replay was at once
    assert job.state is JobState.BACKING_OFF
    desk.tick(0.2)
    desk.lose(attempt(job).decode, Loss.UNREACHABLE)
    assert ear(job).ended == "500"
    assert job.attempts == 3
    assert ear(job).message == "gave up after 3 attempts: a node was lost (unreachable)"


def test_retractions_and_goodbyes_are_not_counted() -> None:
    desk = Desk()
    job = desk.submit()
    desk.tokens("d1", room(job), 0, 50)
    for i in range(40):
        desk.retract("d1", room(job))
        if i % 10 == 0:
            desk.lose("d1", Loss.LEFT)
            desk.join("d1")
    assert ear(job).ended is None
    assert job.attempts > 40


@pytest.mark.parametrize("kind", RETRYABLE)
def test_faults_are_replayed_a_few_times_with_a_wait(kind: FailureKind) -> None:
    limits = ReplayLimits(max_after_death=2, max_after_fault=3, max_after_refusal=4, backoff_s=0.1)
    desk = Desk(replay=limits)
    job = desk.submit()
    waits = []
    while ear(job).ended is None:
        desk.fail("p1", room(job), kind)
        waits.append(0.0)
        while job.state is JobState.BACKING_OFF:
            desk.tick(0.01)
            waits[-1] += 0.01
    tries = {FailureKind.ENGINE: 2, FailureKind.REFUSED: 4}.get(kind, 3)
    assert job.attempts == tries + 1
    assert all(wait > 0.04 for wait in waits[:-1])
    assert waits[tries - 1] > waits[0]
    assert ear(job).ended == ("429" if kind is FailureKind.REFUSED else "500")


@pytest.mark.parametrize("kind", [FailureKind.INVALID, FailureKind.TOO_LARGE])
def test_what_can_never_run_is_400_at_once_and_the_other_half_is_cancelled(
    kind: FailureKind,
) -> None:
    desk = Desk()
    job = desk.submit()
    old = room(job)
    desk.fail("p1", old, kind)
    assert ear(job).ended == "400"
    assert (desk.aborts("d1"), desk.aborts("p1")) == ([old], [])


def test_a_lost_peer_is_avoided_not_its_reporter() -> None:
    desk = Desk("p1 p2 d1 d2")
    job = desk.submit()
    first = attempt(job)
    other = attempt(desk.submit("other"))  # by turns the next would be the first pair again
    desk.fail(first.decode, first.room, FailureKind.PEER_LOST)
    desk.tick(1.0)
    assert attempt(job).computes == other.computes
    assert attempt(job).decode == first.decode


def test_a_gap_in_the_link_aborts_what_the_node_still_holds() -> None:
    desk = Desk()
    job = desk.submit()
    old = room(job)
    desk.lose("d1", Loss.GAP)
    assert desk.aborts("d1") == [old]
    desk.tick(1.0)
    old = room(job)
    desk.lose("d1", Loss.RELINKED)
    assert old not in desk.aborts("d1")
    assert old in desk.aborts("p1")


# ---------------------------------------------------------------- waiting


def test_a_replay_waits_for_a_node_only_so_long() -> None:
    desk = Desk(node_wait_s=5.0)
    job = desk.submit()
    desk.lose("d1", Loss.SILENT)
    desk.tick(0.0)
    desk.tick(4.9)
    assert job.state is JobState.QUEUED
    desk.tick(0.2)
    assert ear(job).ended == "503"


def test_a_node_that_comes_in_time_ends_the_wait() -> None:
    desk = Desk(node_wait_s=5.0)
    job = desk.submit()
    desk.lose("d1", Loss.SILENT)
    desk.tick(4.0)
    desk.join("d2")
    assert attempt(job).decode == "d2"
    desk.tick(4.0)
    assert ear(job).ended is None


def test_paused_nodes_hold_requests_without_a_bound() -> None:
    desk = Desk(node_wait_s=5.0)
    desk.set_state("d1", NodeState.PAUSED)
    job = desk.submit()
    desk.tick(100.0)
    assert job.state is JobState.QUEUED
    desk.set_state("d1", NodeState.READY)
    assert attempt(job).decode == "d1"


def test_the_deadline_counts_in_every_state() -> None:
    desk = Desk(request_timeout_s=10.0)
    dispatched, backing_off = desk.submit("a"), desk.submit("b")
    desk.fail("d1", room(backing_off), FailureKind.TRANSFER)
    desk.dispatcher.pause(PauseMode.IN_PLACE, desk.now)
    queued = desk.submit("c")
    desk.tick(10.0)
    assert [ear(job).ended for job in (dispatched, backing_off, queued)] == ["504"] * 3
    assert len(desk.dispatcher) == 0


def test_retracted_requests_keep_their_rank_and_go_before_new_ones() -> None:
    desk = Desk()
    old = [desk.submit(f"old{i}") for i in range(3)]
    desk.dispatcher.pause(PauseMode.RETRACT, desk.now)
    new = [desk.submit(f"new{i}") for i in range(2)]
    for i in (2, 0, 1):
        desk.retract("d1", room(old[i]))
    assert {job.state for job in [*old, *new]} == {JobState.QUEUED}
    desk.sent.clear()
    desk.dispatcher.resume(desk.now)
    desk.settle()
    order = [generate.rid for generate in desk.generates("p1")]
    assert order == ["old0", "old1", "old2", "new0", "new1"]


def test_a_node_that_drains_hands_its_requests_on_at_no_cost() -> None:
    desk = Desk("p1 p2 d1", replay=ReplayLimits(max_after_fault=0, max_after_death=0))
    job = desk.submit()
    leaving = attempt(job).computes
    failed = Failed(room=room(job), kind=FailureKind.DRAINING, message="leaving")
    desk.say(leaving, failed)
    desk.fail(leaving, failed.room, failed.kind)
    assert attempt(job).computes != leaving
    desk.set_state(leaving, NodeState.READY)  # an older heartbeat comes late
    others = [desk.submit(f"r{i}") for i in range(3)]
    assert leaving not in {attempt(other).computes for other in others}


def test_a_replay_goes_before_an_older_request_that_never_ran() -> None:
    desk = Desk("p1")
    desk.join("d1", num_pages=1)
    waits_for_a_larger_node = desk.submit("large", max_tokens=40)
    small = desk.submit("small")
    assert waits_for_a_larger_node.rank < small.rank
    desk.dispatcher.pause(PauseMode.RETRACT, desk.now)
    desk.retract("d1", room(small))
    desk.join("d2")
    desk.sent.clear()
    desk.dispatcher.resume(desk.now)
    desk.settle()
    assert [generate.rid for generate in desk.generates("p1")] == ["small", "large"]


# ---------------------------------------------------------------- ends on demand


def test_abort_reaches_every_state() -> None:
    desk = Desk()
    dispatched, backing_off = desk.submit("a"), desk.submit("b")
    desk.fail("d1", room(backing_off), FailureKind.TRANSFER)
    desk.dispatcher.pause(PauseMode.IN_PLACE, desk.now)
    queued = desk.submit("c")
    old = room(dispatched)
    jobs = desk.dispatcher.unfinished()
    assert desk.dispatcher.abort(jobs, desk.now, "asked") == 3
    desk.settle()
    assert [ear(job).ended for job in (dispatched, backing_off, queued)] == ["abort"] * 3
    assert old in desk.aborts("p1")
    assert old in desk.aborts("d1")
    desk.dispatcher.resume(desk.now)
    desk.tick(60.0)
    assert len(desk.generates("d1")) == 2
    assert desk.dispatcher.abort(jobs, desk.now, "again") == 0


def test_a_client_that_left_hears_nothing_and_both_nodes_are_told() -> None:
    desk = Desk()
    job = desk.submit()
    old = room(job)
    desk.dispatcher.cancel(job, desk.now)
    desk.dispatcher.cancel(job, desk.now)
    desk.settle()
    assert ear(job).outputs == []
    assert desk.aborts("p1") == desk.aborts("d1") == [old]
    desk.tokens("d1", old, 0, 50)
    assert ear(job).outputs == []


def test_a_node_side_abort_ends_the_request() -> None:
    desk = Desk()
    job = desk.submit()
    old = room(job)
    desk.dispatcher.on_aborted("p1", old, desk.now)
    desk.settle()
    assert ear(job).ended == "abort"
    assert desk.aborts("d1") == [old]


def test_pause_abort_ends_what_is_there_and_holds_what_comes() -> None:
    desk = Desk()
    job = desk.submit("a")
    desk.dispatcher.pause(PauseMode.ABORT, desk.now)
    late = desk.submit("b")
    assert ear(job).ended == "abort"
    assert late.state is JobState.QUEUED
    desk.dispatcher.pause(PauseMode.ABORT, desk.now)
    desk.settle()
    assert ear(late).ended == "abort"


@pytest.mark.parametrize("mode", list(PauseMode))
def test_pausing_an_idle_router_is_a_no_op_that_can_be_repeated(mode: PauseMode) -> None:
    desk = Desk()
    for _ in range(2):
        desk.dispatcher.pause(mode, desk.now)
    desk.dispatcher.resume(desk.now)
    assert desk.submit().state is JobState.DISPATCHED


def test_shutdown_answers_everybody() -> None:
    desk = Desk()
    jobs = [desk.submit(f"r{i}") for i in range(3)]
    desk.dispatcher.fail_all(unavailable("going"), desk.now)
    desk.settle()
    assert [ear(job).ended for job in jobs] == ["503"] * 3


def test_the_table_refuses_other_edges() -> None:
    desk = Desk()
    job = desk.submit()
    desk.dispatcher.cancel(job, desk.now)
    assert EDGES[JobState.ENDED] == frozenset()
    with pytest.raises(IllegalTransition):
        job.move(JobState.QUEUED)
