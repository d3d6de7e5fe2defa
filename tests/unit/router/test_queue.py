"""The router's own queue: who starts when, what nodes are given, what the queue costs."""

import pytest

from common.messages import FailureKind, StopReason
from common.modes import PauseMode
from router.errors import ApiError
from router.load import LOOK_AHEAD_REQUESTS, decode_slots
from router.node import Loss
from router.picking import Full, Pair
from router.protocol.requests import CompletionRequest, GenerateRequest
from router.protocol.terms import MAX_PRIORITY, Terms
from router.requests import HEADROOM_TOKENS, Job, JobState
from router.waiting import SLACK
from tests.unit.router.candidates import candidate, pick
from tests.unit.router.desk import Desk, attempt, ear, room


def finish(desk: Desk, job: Job) -> None:
    desk.tokens(attempt(job).decode, room(job), len(job.output_ids), 50, finish=StopReason.STOP)


def first_token(desk: Desk, job: Job) -> None:
    desk.tokens(attempt(job).computes, room(job), 0, 50)


def roomy() -> Desk:
    """A pair whose decode node has pages for everything here."""
    desk = Desk("p1")
    desk.join("d1", num_pages=1000)
    return desk


def dispatched(jobs: list[Job]) -> int:
    return sum(job.state is JobState.DISPATCHED for job in jobs)


# ---------------------------------------------------------------- what nodes are given


def test_a_prefill_node_gets_a_little_more_than_it_computes() -> None:
    desk = roomy()
    jobs = [desk.submit(f"r{i}", prompt=600) for i in range(5)]
    assert len(desk.generates("p1")) == LOOK_AHEAD_REQUESTS
    first_token(desk, jobs[0])
    assert dispatched(jobs) == 3


def test_many_short_prompts_make_a_full_step() -> None:
    desk = roomy()
    for i in range(60):
        desk.submit(f"r{i}", prompt=20, max_tokens=1)
    assert 51 <= len(desk.generates("p1")) <= 52  # 1024 tokens and the one that passes it


def test_a_decode_node_gets_twice_what_it_runs() -> None:
    desk = Desk("p1")
    desk.join("d1", max_running_requests=4, num_pages=1000)
    jobs = [desk.submit(f"r{i}") for i in range(12)]
    assert dispatched(jobs) == decode_slots(4) == 8
    finish(desk, jobs[3])
    assert jobs[8].state is JobState.DISPATCHED
    assert dispatched(jobs) == 8


def test_a_decode_node_gets_one_more_than_its_pages_hold_and_growth_counts() -> None:
    desk = Desk("p1")
    desk.join("d1", num_pages=32)  # 512 tokens; a request is counted with 3 + 128
    jobs = [desk.submit(f"r{i}", max_tokens=400) for i in range(6)]
    assert dispatched(jobs) == 4
    desk.dispatcher.cancel(jobs[0], desk.now)  # 393 held
    assert jobs[4].state is JobState.DISPATCHED
    desk.tokens("d1", room(jobs[1]), 0, *([50] * 200))
    desk.dispatcher.cancel(jobs[2], desk.now)
    assert jobs[1].held_tokens == 203 + HEADROOM_TOKENS
    assert jobs[5].state is JobState.QUEUED


def test_other_routers_work_counts_and_its_end_is_noticed() -> None:
    desk = Desk()
    desk.beat("p1", queued_tokens=5000, queues={"waiting": 9})
    job = desk.submit()
    assert not desk.generates("p1")
    desk.beat("p1", queued_tokens=100, queues={"waiting": 1})
    assert job.state is JobState.DISPATCHED


def test_a_heartbeat_does_not_count_our_own_work_twice_or_too_long() -> None:
    desk = roomy()
    jobs = [desk.submit(f"r{i}", prompt=600) for i in range(3)]
    desk.beat("p1", queued_tokens=1200, queues={"waiting": 2})
    first_token(desk, jobs[0])  # the last heartbeat still speaks of it
    assert jobs[2].state is JobState.DISPATCHED


def test_pages_in_quarantine_are_not_given_away() -> None:
    desk = Desk("p1")
    desk.join("d1", num_pages=64)
    desk.submit("a", max_tokens=400)
    desk.beat("d1", quarantined_pages=60)
    waiting = desk.submit("b", max_tokens=400)
    assert len(desk.generates("d1")) == 1
    desk.beat("d1")
    assert waiting.state is JobState.DISPATCHED


def test_an_empty_node_takes_even_what_fills_it() -> None:
    desk = Desk("p1")
    desk.join("d1", num_pages=32)
    assert desk.submit(prompt=500, max_tokens=12).state is JobState.DISPATCHED


def test_room_on_one_of_two_nodes_is_used() -> None:
    desk = Desk("p1 d1 d2")
    desk.beat("d1", queued_tokens=10**6, queues={"running": 100})
    assert {attempt(desk.submit(f"r{i}")).decode for i in range(4)} == {"d2"}


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    desk = Desk("p1")
    desk.join("d1", num_pages=64)
    desk.join("d2", num_pages=8)  # 128 tokens
    first = desk.submit("first", max_tokens=500, prompt=500)
    second = desk.submit("second", max_tokens=500, prompt=500)
    assert {attempt(first).decode, attempt(second).decode} == {"d1"}
    for job in (first, second):
        first_token(desk, job)
    large = desk.submit("large", max_tokens=500, prompt=500)
    small = [desk.submit(f"small{i}") for i in range(3)]
    assert large.state is JobState.QUEUED
    assert {attempt(job).decode for job in small} == {"d2"}  # which could not hold the large one
    finish(desk, first)
    assert attempt(large).decode == "d1"


def test_a_replay_waits_for_another_node_rather_than_go_back() -> None:
    desk = Desk("p1 d1 d2")
    job = desk.submit()
    bad = attempt(job).decode
    other = "d2" if bad == "d1" else "d1"
    desk.beat(other, queued_tokens=10**6, queues={"running": 200})
    desk.fail(bad, room(job), FailureKind.ENGINE)
    desk.tick(1.0)
    assert job.state is JobState.QUEUED
    desk.beat(other)
    assert attempt(job).decode == other


def test_a_pair_needs_room_on_both_sides() -> None:
    p, d = candidate("p"), candidate("d")
    closed_p, closed_d = candidate("p", is_open=False), candidate("d", is_open=False)
    assert pick([p], [d]) == Pair("p", "d")
    assert pick([p], [closed_d]) == Full(frozenset("d"))
    assert pick([closed_p], [d]) == Full(frozenset("p"))
    assert pick([closed_p], [closed_d]) == Full(frozenset("d"))
    assert pick([p], [candidate("d", capacity=1)]) is None


# ---------------------------------------------------------------- order


def blocked() -> Desk:
    """A desk on which nothing starts before `desk.beat("p1")`."""
    desk = Desk()
    desk.beat("p1", queued_tokens=10**6, queues={"waiting": 100})
    return desk


def test_lower_priorities_start_first_and_equals_by_age() -> None:
    desk = blocked()
    for rid, priority in [("a", 3), ("b", -1), ("c", 0), ("d", -1), ("e", 3)]:
        desk.submit(rid, terms=Terms(priority=priority))
    desk.beat("p1")
    assert [generate.rid for generate in desk.generates("p1")] == ["b", "d", "c", "a", "e"]
    assert [generate.priority for generate in desk.generates("d1")] == [-1, -1, 0, 3, 3]


def test_replays_go_before_any_priority() -> None:
    desk = Desk()
    old = desk.submit("old", terms=Terms(priority=9))
    desk.dispatcher.pause(PauseMode.RETRACT, desk.now)
    desk.submit("urgent", terms=Terms(priority=-9))
    desk.retract("d1", room(old))
    desk.sent.clear()
    desk.dispatcher.resume(desk.now)
    desk.settle()
    assert [generate.rid for generate in desk.generates("p1")] == ["old", "urgent"]


def test_vllm_puts_low_numbers_first_and_sglang_high_ones() -> None:
    assert CompletionRequest(prompt="x", priority=7).terms().priority == 7
    assert GenerateRequest(text="x", priority=7).terms(higher_first=True).priority == -7
    assert CompletionRequest(prompt="x").terms() == Terms()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", MAX_PRIORITY + 1),
        ("priority", -MAX_PRIORITY - 1),
        ("timeout_s", 0.0),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
    ],
)
def test_terms_out_of_range_are_400(field: str, value: float) -> None:
    body = CompletionRequest(prompt="x", **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ApiError) as caught:
        body.terms()
    assert (caught.value.status, caught.value.param) == (400, field)


# ---------------------------------------------------------------- time-outs and departures


def states(desk: Desk, **settings: object) -> dict[str, Job]:
    """One job in each state in which a job can wait or run; nothing moves by itself any more."""
    jobs = {}
    for name in ("dispatched", "backing_off", "stranded", "queued", "paused"):
        large = {"prompt": 600, "max_tokens": 400} if name == "stranded" else {}
        jobs[name] = desk.submit(name, **large, **settings)  # type: ignore[arg-type]
        if name == "backing_off":
            desk.fail("d1", room(jobs[name]), FailureKind.TRANSFER)
        if name == "stranded":
            desk.lose("d1", Loss.LEFT)
            desk.join("d1", num_pages=16)
            assert jobs[name].state is JobState.QUEUED
            jobs["dispatched"] = desk.submit("again", **settings)  # type: ignore[arg-type]
            desk.beat("p1", queued_tokens=10**6, queues={"waiting": 9})
        if name == "queued":
            desk.dispatcher.pause(PauseMode.IN_PLACE, desk.now)
    assert jobs["dispatched"].state is JobState.DISPATCHED
    assert jobs["backing_off"].state is JobState.BACKING_OFF
    return jobs


def test_a_time_out_of_its_own_ends_a_request_in_every_state() -> None:
    desk = Desk(request_timeout_s=100.0)
    jobs = states(desk, terms=Terms(timeout_s=5.0))
    late = desk.submit("late")
    held = room(jobs["dispatched"])
    desk.tick(4.9)
    assert {ear(job).ended for job in jobs.values()} == {None}
    desk.tick(0.2)
    assert {ear(job).ended for job in jobs.values()} == {"504"}
    assert held in desk.aborts("p1")
    assert held in desk.aborts("d1")
    assert ear(late).ended is None
    desk.tick(100.0)
    assert ear(late).ended == "504"


def test_a_time_out_counts_from_the_http_request_and_has_a_maximum() -> None:
    desk = Desk(request_timeout_s=10.0)
    slow = desk.submit("slow", terms=Terms(timeout_s=5.0), arrived=desk.now - 5.0)
    greedy = desk.submit("greedy", terms=Terms(timeout_s=1e9))
    assert ear(slow).ended == "504"
    assert not [g for g in desk.generates("p1") if g.rid == "slow"]
    desk.tick(10.0)
    assert ear(greedy).ended == "504"


def test_a_client_that_leaves_frees_everything_in_every_state_and_is_not_replayed() -> None:
    desk = Desk()
    jobs = states(desk)
    held = room(jobs["dispatched"])
    for job in jobs.values():
        desk.dispatcher.cancel(job, desk.now)
    for job in desk.dispatcher.unfinished():
        desk.dispatcher.cancel(job, desk.now)
    desk.settle()
    assert held in desk.aborts("p1")
    assert held in desk.aborts("d1")
    desk.sent.clear()
    desk.fail("d1", held, FailureKind.TRANSFER)
    desk.retract("p1", held)
    desk.dispatcher.resume(desk.now)
    desk.beat("p1")
    for _ in range(20):
        desk.tick(1.0)
    assert not desk.sent
    assert all(not ear(job).outputs for job in jobs.values())
    nothing = desk.dispatcher.backlog()
    assert (len(desk.dispatcher), nothing.queued_tokens, nothing.held_tokens) == (0, 0, 0)
    assert desk.dispatcher.intake.is_idle()


def test_clients_that_come_and_go_during_a_stall_leave_nothing_behind() -> None:
    desk = blocked()
    stays = desk.submit("stays")
    for i in range(20 * SLACK):
        desk.dispatcher.cancel(desk.submit(f"r{i}"), desk.now)
    waiting = desk.dispatcher.intake.waiting
    assert waiting.num_entries <= 2 + SLACK + 1
    assert waiting.tokens == 3
    desk.beat("p1")
    assert stays.state is JobState.DISPATCHED
    assert not waiting
    assert waiting.tokens == waiting.held_tokens == 0


def test_a_queue_behind_full_nodes_costs_nothing_to_look_at() -> None:
    desk = blocked()
    for i in range(500):
        desk.submit(f"r{i}")
    looked_at = 0
    original = desk.dispatcher.intake.waiting.put

    def counting(job: Job) -> None:
        nonlocal looked_at
        looked_at += 1
        original(job)

    desk.dispatcher.intake.waiting.put = counting  # type: ignore[method-assign]
    desk.tick(0.1)
    assert looked_at == 1


# ---------------------------------------------------------------- the reason at the end


def test_a_request_that_waits_in_vain_says_what_happened_before() -> None:
    desk = Desk(node_wait_s=5.0)
    job = desk.submit()
    desk.lose("d1", Loss.SILENT)
    desk.tick(0.0)
    desk.tick(5.1)
    assert ear(job).ended == "503"
    assert "no decode node" in ear(job).message
    assert "a node was lost (silent)" in ear(job).message


def test_waits_between_attempts_grow_and_differ() -> None:
    waits: list[list[float]] = []
    for seed in range(2):
        desk = Desk("p1 d1")
        desk.dispatcher._random.seed(seed)
        job = desk.submit()
        waits.append([])
        for _ in range(5):
            desk.fail("d1", room(job), FailureKind.TRANSFER)
            before = desk.now
            while job.state is JobState.BACKING_OFF:
                desk.tick(0.005)
            waits[-1].append(desk.now - before)
    for row in waits:
        for i, wait in enumerate(row):
            assert 0.5 * 0.1 * 2**i - 0.01 <= wait <= 0.1 * 2**i + 0.01
    assert waits[0] != waits[1]
