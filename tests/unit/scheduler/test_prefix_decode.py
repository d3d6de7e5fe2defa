"""A decode node's prefix cache: what it asks prefill for, and what the next turn finds here."""

from typing import Any

import pytest

from common.messages import (
    Abort,
    Cancel,
    Destination,
    Drained,
    PeerWelcome,
    Retracted,
    RoomUnknown,
    SamplingParams,
)
from common.modes import PauseMode
from tests.unit.scheduler.harness import Driven, decode, generate, landed
from tests.unit.scheduler.node_settings import FINGERPRINT


def ready(**overrides: Any) -> Driven:
    """A decode node whose link to `p` stands."""
    node = decode(**overrides)
    node.router(generate(99))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.router(Abort(99))
    node.step()
    node.to_peer.clear()
    return node


def arrive(node: Driven, room: int, prompt: list[int], **fields: Any) -> Destination:
    """Its request has come; returns what prefill is told."""
    node.router(generate(room, prompt_ids=prompt, **fields))
    node.step()
    (destination,) = (d for d in node.said(Destination) if d.room == room)
    assert isinstance(destination, Destination)
    return destination


def converse(node: Driven, room: int, prompt: list[int], max_tokens: int) -> Destination:
    """One request from arrival to end; every token is a 5."""
    destination = arrive(node, room, prompt, max_tokens=max_tokens)
    node.fact(landed(room, token=5))
    for _ in range(max_tokens + 1):
        node.step(token=5)
    assert not node.scheduler.unfinished()
    return destination


def asked(destination: Destination) -> tuple[int, int]:
    return destination.first_page, len(destination.pages)


@pytest.mark.parametrize(
    ("max_tokens", "new", "expected"),
    [
        (2, 1, (2, 1)),
        (3, 1, (2, 2)),
        (8, 1, (4, 1)),
        (8, 5, (4, 2)),
        (11, 2, (4, 2)),
        (12, 1, (5, 1)),
    ],
)
def test_the_next_turn_asks_only_for_what_is_new(
    max_tokens: int, new: int, expected: tuple[int, int]
) -> None:
    """Pages of 4. Prompt and outputs are known but for the last token, which was not computed."""
    node = ready()
    prompt = list(range(9))
    assert asked(converse(node, 1, prompt, max_tokens)) == (0, 3)
    following = [*prompt, *[5] * max_tokens, *range(60, 60 + new)]
    assert asked(arrive(node, 2, following)) == expected


def test_outputs_are_cached_page_by_page_while_they_are_made() -> None:
    node = ready()
    arrive(node, 1, list(range(7)), max_tokens=30)
    node.fact(landed(1, token=5))
    cached = []
    for _ in range(10):
        node.step(token=5)
        cached.append(node.scheduler.kv.num_cached)
    assert cached == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]


def test_nothing_is_cached_before_the_whole_room_has_landed() -> None:
    node = ready()
    arrive(node, 1, list(range(14)))
    node.fact(landed(1, chunk=0, total=2))
    node.step()
    assert node.scheduler.kv.num_cached == 0
    node.fact(landed(1, chunk=1, total=2))
    node.step()
    assert node.scheduler.kv.num_cached == 3


def test_pages_in_use_are_shared_and_count_once() -> None:
    node = ready(num_pages=8)
    arrive(node, 1, list(range(13)), max_tokens=4)
    node.fact(landed(1))
    node.step()
    second = arrive(node, 2, [*range(12), 50], max_tokens=4)
    assert asked(second) == (3, 1)
    assert node.scheduler.kv.num_free == 3


def test_a_request_that_fits_only_with_what_is_cached_is_let_in() -> None:
    """12 pages: 1 holds 7 of them, and of the 8 that 2 needs, 6 are shared."""
    node = ready(num_pages=12)
    arrive(node, 1, list(range(25)), max_tokens=3)
    node.fact(landed(1))
    node.step()
    assert asked(arrive(node, 2, [*range(24), *range(60, 67)], max_tokens=2)) == (6, 2)


def test_cached_pages_that_nobody_uses_make_room() -> None:
    node = ready(num_pages=6)
    converse(node, 1, list(range(14)), 8)
    assert (node.scheduler.kv.num_cached, node.scheduler.kv.num_free) == (5, 6)
    assert asked(arrive(node, 2, list(range(40, 62)), max_tokens=2)) == (0, 6)
    assert node.scheduler.counters["cache_evictions"] == 5


def test_a_destination_that_is_sent_again_says_the_same() -> None:
    node = ready()
    converse(node, 1, list(range(9)), 2)
    first = arrive(node, 2, list(range(14)))
    node.peer(RoomUnknown(2), "p")
    node.step()
    assert node.said(Destination)[-2:] == [first, first]
    assert asked(first) == (2, 2)


def test_what_was_hit_is_given_back_at_once_and_the_rest_when_prefill_says_so() -> None:
    node = ready()
    converse(node, 1, list(range(9)), 2)
    arrive(node, 2, list(range(14)))
    node.router(Abort(2))
    node.step()
    assert node.said(Cancel) == [Cancel(2)]
    assert node.scheduler.kv.num_free == 22
    node.peer(Drained(room=2), "p")
    node.step()
    assert node.scheduler.kv.num_free == 24
    assert node.scheduler.kv.num_cached == 2


def test_a_lost_prefills_room_sets_only_its_own_pages_aside() -> None:
    node = ready()
    converse(node, 1, list(range(9)), 2)
    arrive(node, 2, list(range(14)))
    node.scheduler._on_peer_lost("p", "silent")
    node.step()
    assert node.scheduler.kv.num_quarantined == 2
    assert node.scheduler.kv.num_free == 22


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
def test_nothing_computed_before_such_a_pause_is_used_after_it(mode: PauseMode) -> None:
    node = ready()
    converse(node, 1, list(range(9)), 2)
    arrive(node, 2, list(range(14)))
    node.scheduler.pause_generation(mode)
    node.fact(landed(2))  # it was on its way
    node.peer(Drained(room=2), "p")
    node.step()
    assert node.scheduler.kv.num_cached == 0
    assert node.scheduler.kv.num_free == 24
    node.scheduler.continue_generation()
    assert asked(arrive(node, 3, list(range(14)))) == (0, 4)


def test_a_retracted_request_keeps_nothing_locked_but_what_it_computed_stays_known() -> None:
    node = ready()
    arrive(node, 1, list(range(14)))
    node.fact(landed(1))
    node.step()
    node.scheduler._retract(node.scheduler._reqs[1])
    node.step()
    assert node.said(Retracted) == [Retracted(1)]
    assert node.scheduler.kv.num_free == 24
    assert node.scheduler.kv.num_cached == 3


def test_a_stray_write_takes_the_pages_it_touched_and_all_behind_them_out_of_the_cache() -> None:
    node = ready()
    first = arrive(node, 1, list(range(17)), max_tokens=30)
    node.fact(landed(1))
    node.step()
    arrive(node, 2, [*range(4), *range(60, 70)], max_tokens=30)
    node.fact(landed(2))
    node.step()
    arrive(node, 3, list(range(70, 80)), max_tokens=30)
    node.fact(landed(3))
    node.step()
    cached = node.scheduler.kv.num_cached
    behind = len(node.scheduler._reqs[1].chain) - 1
    assert behind >= 3
    node.fact(landed(77, pages=[first.pages[1]]))
    assert node.scheduler.kv.num_cached == cached - behind
    node.step()
    assert node.said(Retracted) == [Retracted(1)]
    counters = node.scheduler.counters
    assert (counters["stray_writes"], counters["cache_doubtful_pages"]) == (1, behind)
    node.fact(landed(78, pages=[first.pages[0]]))
    node.step()
    assert node.said(Retracted) == [Retracted(1), Retracted(2)]
    assert asked(arrive(node, 4, list(range(17)))) == (0, 5)


def test_a_request_that_decode_computes_itself_begins_behind_what_is_cached() -> None:
    node = ready()
    converse(node, 1, list(range(9)), 2)
    node.router(generate(2, prompt_ids=list(range(14)), prefill_incarnation=""))
    plan = node.step()
    assert plan.batch is not None
    assert [(row.start, len(row.token_ids)) for row in plan.batch.rows] == [(8, 6)]
    sampling = SamplingParams(max_tokens=8, seed=1, prompt_logprobs=0)
    node.router(generate(3, prompt_ids=list(range(14)), prefill_incarnation="", sampling=sampling))
    plan = node.step()
    assert plan.batch is not None
    assert plan.batch.rows[-1].start == 0


def test_without_a_prefix_cache_all_is_asked_for() -> None:
    node = ready(prefix_cache=False)
    converse(node, 1, list(range(9)), 2)
    assert asked(arrive(node, 2, list(range(14)))) == (0, 4)
    assert node.scheduler.kv.num_cached == 0
