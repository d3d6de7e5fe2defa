"""The decode scheduler by itself: admission, landing, retraction, stray writes."""

import pytest

from common.events import PeerClosed
from common.lifecycle import State
from common.messages import (
    Abort,
    Cancel,
    Destination,
    Drained,
    Failed,
    FailureKind,
    PeerBye,
    PeerWelcome,
    Ping,
    Retracted,
    RoomUnknown,
    StopReason,
    Sync,
    TokenOutput,
    Tokens,
)
from common.modes import PauseMode
from common.plan import ExpectWrites, Notified, PieceLanded, PiecesDropped, RemovePeer
from tests.unit.scheduler.harness import Driven, decode, generate, landed, running
from tests.unit.scheduler.node_settings import FINGERPRINT
from tests.unit.scheduler.world import World


def outputs(node: Driven) -> list[TokenOutput]:
    return [output for tokens in node.said(Tokens) for output in tokens.outputs]


def transferring(*rooms: int) -> Driven:
    node = decode()
    for room in rooms:
        node.router(generate(room))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.step()
    assert [d.room for d in node.said(Destination)] == list(rooms)
    return node


def test_token_zero_is_repeated_as_soon_as_everything_has_landed() -> None:
    node = transferring(1)
    node.scheduler.pause_generation(PauseMode.IN_PLACE)  # it cannot run yet
    node.fact(landed(1))
    node.step()
    assert [(out.index, out.token_ids) for out in outputs(node)] == [(0, [3])]


def test_prefill_may_die_right_after_its_last_write() -> None:
    """Its own first token never reached the router; decode's repetition of it did."""
    world = World(1)
    world.router.muted.add("p1")
    client = world.router.submit([1, 2, 3], 12)
    while not client.decode_spoke:
        world.tick()
    world.kill("p1")
    world.add_prefill()
    world.settle()
    world.router.check()
    assert client.replays == 0


def test_chunks_may_land_in_any_order() -> None:
    node = transferring(1)
    node.fact(landed(1, chunk=2, total=3))
    node.fact(landed(1, chunk=0, total=3))
    node.fact(landed(1, chunk=0, total=3))
    assert node.step().batch is None
    node.fact(landed(1, chunk=1, total=3))
    assert node.step().batch is not None


def test_a_notification_of_another_incarnation_counts_for_nothing() -> None:
    node = transferring(1)
    for stale in (landed(1, source="p-old"), landed(1, target="d-old"), Notified(b"garbage")):
        node.fact(stale)
        assert node.step().batch is None
    node.fact(landed(1))
    assert node.step().batch is not None


GENUINE = landed(1).payload


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", GENUINE[:-1], GENUINE[:5], GENUINE + b"\x00", b"\x91" * 100_000,
        GENUINE.replace(b"ChunkLanded", b"ChunkLambda"), bytes(range(256)),
        landed(1, token=-1).payload, landed(1, token=1 << 40).payload,
    ],
)  # fmt: skip
def test_a_notification_that_makes_no_sense_is_counted_and_changes_nothing(payload: bytes) -> None:
    node = transferring(1)
    for _ in range(3):
        node.fact(Notified(payload))
    assert node.step().batch is None
    assert node.scheduler.counters["garbage_notifications"] == 3
    node.fact(landed(1))
    assert node.step().batch is not None


def test_the_last_token_ends_the_request_in_the_step_that_drew_it() -> None:
    node = decode()
    running(node, 1, max_tokens=3)
    node.step()
    assert len(node.scheduler.running_batch) == 0
    assert node.scheduler.kv.num_free == 24
    node.step()
    assert outputs(node)[-1].finish is StopReason.LENGTH


def test_the_youngest_is_retracted_first_and_the_oldest_never() -> None:
    node = decode(num_pages=7)
    running(node, 1, 2, 3, max_tokens=20)
    for _ in range(20):
        node.step()
    assert [retracted.room for retracted in node.said(Retracted)] == [3, 2]
    assert max(out.index for out in outputs(node) if out.room == 1) == 19


def test_the_least_urgent_is_retracted_first_whatever_its_age() -> None:
    node = decode(num_pages=7)
    running(node, 1, max_tokens=20, priority=1)
    running(node, 2, 3, max_tokens=20)
    for _ in range(20):
        node.step()
    assert [retracted.room for retracted in node.said(Retracted)] == [1, 3]
    assert max(out.index for out in outputs(node) if out.room == 2) == 19


def test_urgent_requests_go_first_in_every_queue() -> None:
    node = decode()
    for room, priority in ((1, 0), (2, 5), (3, -1)):
        node.router(generate(room, priority=priority))
    ranked = [req.room for req in node.scheduler.queues[State.PREALLOC]]
    assert ranked == [3, 1, 2]


def test_a_retracted_request_comes_back_in_its_old_rank() -> None:
    node = transferring(1)
    node.router(generate(2, age_s=5.0))
    node.router(generate(3, age_s=9.0))
    ranked = [req.room for req in node.scheduler.queues[State.PREALLOC]]
    assert ranked == [3, 2]


def test_what_exceeds_the_pool_is_refused_on_arrival() -> None:
    node = decode(num_pages=3)
    node.router(generate(1, prompt=6, max_tokens=8))
    node.router(generate(2, prompt=6, max_tokens=7))
    node.step()
    assert [(f.room, f.kind) for f in node.said(Failed)] == [(1, FailureKind.TOO_LARGE)]


def test_an_aborted_transfer_keeps_its_pages_until_prefill_has_drained() -> None:
    node = transferring(1)
    node.router(Abort(1))
    node.step()
    assert node.said(Cancel) == [Cancel(1)]
    assert node.scheduler.kv.num_free == 22
    node.fact(landed(1))
    node.step()
    assert node.scheduler.kv.num_free == 22
    node.peer(Drained(room=1, landed=[0]), "p")
    node.step()
    assert node.scheduler.kv.num_free == 24


def test_an_abort_while_everything_waits_for_pages_ends_at_once() -> None:
    node = decode(num_pages=4, prefix_cache=False)
    running(node, 1, max_tokens=10)  # two of the four pages
    for room in (2, 3):
        node.router(generate(room, prompt=9, max_tokens=4))
    node.step()
    waiting = node.scheduler.queues[State.PREALLOC]
    assert [req.room for req in waiting] == [2, 3]
    node.router(Abort(2))
    node.scheduler.pause_generation(PauseMode.IN_PLACE)
    node.router(Abort(3))
    assert len(waiting) == 0
    node.step()
    assert [req.room for req in node.scheduler.unfinished()] == [1]


def test_a_prefill_that_dies_in_the_handshake_fails_what_waits_for_it() -> None:
    node = decode()
    for room in (1, 2):
        node.router(generate(room))
    node.step()
    node.scheduler.handle(PeerClosed("p", 1, "silent", silent_s=None), 5.0)
    node.step()
    assert [(f.room, f.kind) for f in node.said(Failed)] == [
        (1, FailureKind.PEER_LOST),
        (2, FailureKind.PEER_LOST),
    ]
    assert node.scheduler.kv.num_free == node.scheduler.kv.num_pages


def test_a_lost_cancel_is_said_again() -> None:
    node = transferring(1, 2)
    node.router(Abort(1))
    node.now = 1.0
    node.step()
    assert node.said(Sync)[-1] == Sync(open=[2], cancelling=[1])
    node.peer(RoomUnknown(2), "p")
    node.step()
    assert [d.room for d in node.said(Destination)] == [1, 2, 2]


def test_a_stray_write_retracts_whoever_owns_its_pages_now() -> None:
    node = decode()
    running(node, 1, 2)
    victim = node.scheduler._reqs[2]
    node.fact(landed(77, pages=[victim.pages[0]]))
    node.step()
    assert node.said(Retracted) == [Retracted(2)]
    assert node.scheduler.counters["stray_writes"] == 1


def test_a_piece_of_a_room_that_waits_is_no_landing() -> None:
    node = transferring(1)
    for _ in range(2):
        node.fact(PieceLanded(landed(1).payload))
        assert node.step().batch is None
    node.fact(landed(1))
    assert node.step().batch is not None
    assert node.scheduler.counters["stray_writes"] == 0


def test_a_piece_of_a_stray_write_retracts_whoever_owns_its_pages_now() -> None:
    """Its heads are in the page already; the rank that has the others may have died."""
    node = decode()
    running(node, 1, 2)
    victim = node.scheduler._reqs[2]
    node.fact(PieceLanded(landed(77, pages=[victim.pages[0]]).payload))
    node.step()
    assert node.said(Retracted) == [Retracted(2)]
    assert node.scheduler.counters["stray_writes"] == 1


def test_pieces_that_make_no_sense_or_are_late_change_nothing() -> None:
    node = transferring(1)
    pages = list(node.scheduler._reqs[1].pages)
    for payload in (b"\xc1", landed(1, source="p-old", pages=[]).payload):
        node.fact(PieceLanded(payload))
    node.fact(PiecesDropped(3))
    assert node.scheduler.counters["garbage_notifications"] == 1
    assert node.scheduler.counters["dropped_pieces"] == 3
    node.router(Abort(1))
    node.fact(PieceLanded(landed(1, pages=pages).payload))
    node.peer(Drained(room=1, landed=[0]), "p")
    running(node, 2)
    node.fact(PieceLanded(landed(1, pages=pages).payload))
    node.step()
    assert not node.said(Retracted)
    assert node.scheduler.counters["late_writes"] == 1


def test_what_came_of_incomplete_writes_is_forgotten_with_the_link() -> None:
    node = transferring(1)
    node.scheduler.handle(PeerClosed("p", 1, "silent", silent_s=1.0), 5.0)
    node.step()
    assert node.sent(RemovePeer) == [RemovePeer("p")]


def test_last_pieces_of_one_that_left_by_its_own_word_may_still_come() -> None:
    node = transferring(1)
    node.peer(PeerBye(), "p")
    node.scheduler.handle(PeerClosed("p", 1, "hung up", silent_s=0.0), 0.1)
    node.step()
    assert node.sent(RemovePeer) == []
    node.fact(landed(1))
    assert node.step().batch is not None


def test_a_notification_that_was_known_to_have_landed_is_harmless() -> None:
    node = transferring(1)
    pages = list(node.scheduler._reqs[1].pages)
    node.router(Abort(1))
    node.peer(Drained(room=1, landed=[0]), "p")
    running(node, 2)
    node.fact(landed(1, pages=pages))
    node.step()
    assert not node.said(Retracted)


def test_the_transfer_clock_stops_while_prefill_is_paused() -> None:
    node = transferring(1)
    node.peer(Ping(0.0, True), "p")
    node.now = 100.0
    node.step()
    assert not node.said(Failed)
    node.peer(Ping(0.0, False), "p")
    node.now = 119.0
    node.step()
    assert not node.said(Failed)
    node.now = 121.0
    node.step()
    assert [answer.kind for answer in node.said(Failed)] == [FailureKind.TRANSFER]
    assert node.said(Cancel) == [Cancel(1)]


def test_a_request_whose_link_is_down_does_not_hold_back_the_others() -> None:
    node = decode()
    node.router(generate(1, prefill_incarnation="q", age_s=9.0))
    node.router(generate(2))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.step()
    assert [d.room for d in node.said(Destination)] == [2]


def test_the_backend_is_told_while_writes_are_due() -> None:
    node = transferring(1)
    node.fact(landed(1))
    node.step()
    node.step()
    assert [hint.on for hint in node.sent(ExpectWrites)] == [True, False]
