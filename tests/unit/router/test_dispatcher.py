"""The life of a request at the router, with scripted nodes."""

import pytest

from common.messages import FailureKind, StopReason, TokenLogprob
from router.admission import AdmissionLimits
from router.errors import ApiError
from router.requests import JobState, NewTokens
from tests.unit.router.desk import Desk, attempt, ear, room

RETRYABLE = [
    FailureKind.TRANSFER,
    FailureKind.EXPIRED,
    FailureKind.PEER_LOST,
    FailureKind.REFUSED,
    FailureKind.ENGINE,
]

# ---------------------------------------------------------------- dispatch


def test_both_nodes_get_the_request_and_decode_is_told_of_prefill() -> None:
    desk = Desk()
    job = desk.submit()
    (prefill,), (decode,) = desk.generates("p1"), desk.generates("d1")
    assert prefill.room == decode.room == room(job) != 0
    assert (prefill.prompt_ids, prefill.output_ids, prefill.attempt) == ([5, 6, 7], [], 1)
    assert (prefill.prefill_address, prefill.prefill_incarnation) == ("", "")
    assert (decode.prefill_address, decode.prefill_incarnation) == ("tcp://p1", "p1")


def test_every_attempt_has_a_room_of_its_own() -> None:
    desk = Desk()
    jobs = [desk.submit(f"r{i}") for i in range(50)]
    for job in jobs:
        desk.retract("d1", room(job))
    rooms = [generate.room for generate in desk.generates("p1")]
    assert len(rooms) == len(set(rooms)) == 100


def test_a_request_id_used_twice_is_another_one_for_nodes() -> None:
    desk = Desk()
    first, second = desk.submit("same"), desk.submit("same")
    assert first.public_rid == second.public_rid
    assert len({generate.rid for generate in desk.generates("d1")}) == 2


def test_too_many_requests_and_no_node_are_told_apart() -> None:
    desk = Desk(admission=AdmissionLimits(max_requests=1))
    desk.check()
    desk.submit()
    with pytest.raises(ApiError) as busy:
        desk.check()
    assert (busy.value.status, busy.value.retry_after_s) == (429, 1)
    with pytest.raises(ApiError) as nobody:
        Desk("p1").check()
    assert nobody.value.status == 503
    assert "decode" in nobody.value.message


def test_only_nodes_with_equal_fingerprints_work_together() -> None:
    desk = Desk("p1")
    desk.join("d1", page_size=32)
    with pytest.raises(ApiError, match="page_size"):
        desk.check()
    desk.join("d2")
    for i in range(4):
        assert attempt(desk.submit(f"r{i}")).decode == "d2"


def test_a_request_goes_where_it_fits() -> None:
    desk = Desk("p1")
    desk.join("d1", num_pages=1)
    desk.join("d2")
    assert {attempt(desk.submit(f"r{i}", max_tokens=40)).decode for i in range(4)} == {"d2"}


# ---------------------------------------------------------------- tokens


def test_first_token_comes_from_prefill_and_decode_repeats_it() -> None:
    desk = Desk()
    job = desk.submit()
    desk.tokens("p1", room(job), 0, 50, cached_tokens=2)
    assert ear(job).tokens == [50]
    desk.tokens("d1", room(job), 0, 50, 51)
    desk.tokens("d1", room(job), 2, 52, finish=StopReason.STOP)
    assert ear(job).tokens == [50, 51, 52]
    assert ear(job).ended == "stop"
    assert job.cached_tokens == 2
    assert not desk.aborts("p1") + desk.aborts("d1")


def test_repeated_tokens_are_heard_once() -> None:
    desk = Desk()
    job = desk.submit()
    for _ in range(3):
        desk.tokens("d1", room(job), 0, 50, 51)
    desk.tokens("p1", room(job), 0, 50)
    assert ear(job).tokens == [50, 51]


def test_logprobs_stay_with_their_tokens() -> None:
    desk = Desk()
    job = desk.submit(logprobs=0)
    one, two = TokenLogprob(-1.0), TokenLogprob(-2.0)
    desk.tokens("p1", room(job), 0, 50, logprobs=[one])
    desk.tokens("d1", room(job), 0, 50, 51, logprobs=[one, two])
    assert ear(job).outputs == [NewTokens((50,), (one,)), NewTokens((51,), (two,))]


def test_a_gap_ends_the_attempt_on_both_nodes_and_replays() -> None:
    desk = Desk()
    job = desk.submit()
    old = room(job)
    desk.tokens("p1", old, 0, 50)
    desk.tokens("d1", old, 2, 52)
    assert ear(job).tokens == [50]
    assert job.state is JobState.BACKING_OFF
    assert desk.aborts("p1") == desk.aborts("d1") == [old]
    desk.tick(1.0)
    again = desk.generates("d1")[-1]
    assert (again.output_ids, again.attempt) == ([50], 2)
    assert again.room != old


def test_messages_of_an_earlier_attempt_do_nothing() -> None:
    desk = Desk()
    job = desk.submit()
    old = room(job)
    desk.tokens("p1", old, 0, 50)
    desk.retract("d1", old)
    desk.tokens("d1", old, 1, 66, finish=StopReason.STOP)
    desk.retract("d1", old)
    desk.fail("d1", old, FailureKind.INVALID)
    desk.dispatcher.on_aborted("d1", old, desk.now)
    desk.settle()
    assert ear(job).tokens == [50]
    assert job.state is JobState.DISPATCHED
    assert desk.dispatcher.counters["stale_rooms"] == 4
    desk.tokens("d1", room(job), 1, 51, finish=StopReason.LENGTH)
    assert ear(job).tokens == [50, 51]


def test_only_the_pair_of_a_room_may_speak_of_it() -> None:
    desk = Desk("p1 d1 d2")
    job = desk.submit()
    stranger = "d2" if attempt(job).decode == "d1" else "d1"
    desk.tokens(stranger, room(job), 0, 66)
    desk.fail(stranger, room(job), FailureKind.INVALID)
    assert ear(job).outputs == []


def test_an_output_that_is_complete_is_not_replayed() -> None:
    desk = Desk()
    job = desk.submit(max_tokens=3)
    desk.tokens("d1", room(job), 0, 50, 51, 52, 53, 54)
    assert ear(job).tokens == [50, 51, 52]
    assert ear(job).ended == "length"
    assert desk.aborts("d1")


def test_tokens_of_a_node_that_overlooks_its_stop_token_end_the_request() -> None:
    desk = Desk()
    job = desk.submit(stop_token_ids=(51,))
    desk.tokens("d1", room(job), 0, 50, 51)
    assert ear(job).ended == "stop"
