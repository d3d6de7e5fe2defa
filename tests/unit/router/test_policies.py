"""Choosing nodes, and the load that choices go by."""

from random import Random

import msgspec
import pytest

from router.policies import (
    Candidate,
    Full,
    Pair,
    least_loaded,
    make_choice,
    pick_pair,
    round_robin,
)
from tests.unit.router.desk import FINGERPRINT, Desk, attempt, room


def candidate(
    name: str,
    load: float = 0.0,
    capacity: int = 1000,
    page_size: int = 16,
    is_open: bool = True,
) -> Candidate:
    fingerprint = msgspec.structs.replace(FINGERPRINT, page_size=page_size)
    return Candidate(name, fingerprint, capacity, load, is_open)


def pick(
    prefills: list[Candidate],
    decodes: list[Candidate],
    *,
    tokens: int = 10,
    avoid: set[str] | None = None,
    prefer: str | None = None,
) -> Pair | Full | None:
    return pick_pair(
        prefills,
        decodes,
        tokens=tokens,
        avoid=avoid or set(),
        prefer=prefer,
        choose_prefill=round_robin(),
        choose_decode=round_robin(),
    )


def test_round_robin_takes_turns_also_when_nodes_come_and_go() -> None:
    choose = round_robin()
    a, b, c = candidate("a"), candidate("b"), candidate("c")
    assert [choose([a, b]).incarnation for _ in range(4)] == ["a", "b", "a", "b"]
    assert choose([a, b, c]).incarnation == "c"
    assert choose([a, c]).incarnation == "a"


def test_least_loaded_takes_the_smallest_and_draws_among_equals() -> None:
    choose = least_loaded(Random(1))
    nodes = [candidate("a", 5), candidate("b", 2), candidate("c", 2)]
    assert {choose(nodes).incarnation for _ in range(40)} == {"b", "c"}


def test_random_reaches_all() -> None:
    choose = make_choice("random", Random(1))
    assert {choose([candidate(n, 9) for n in "abc"]).incarnation for _ in range(60)} == set("abc")


def test_a_prefill_without_a_fitting_decode_is_never_chosen() -> None:
    prefills = [candidate("p1", page_size=32), candidate("p2")]
    assert pick(prefills, [candidate("d")]) == Pair("p2", "d")
    assert pick(prefills[:1], [candidate("d")]) is None
    assert pick([], [candidate("d")]) is None


@pytest.mark.parametrize(("prefill", "decode"), [(9, 99), (99, 9)])
def test_both_pools_must_hold_the_request(prefill: int, decode: int) -> None:
    assert pick([candidate("p", capacity=prefill)], [candidate("d", capacity=decode)]) is None


def test_avoided_nodes_are_the_last_resort() -> None:
    prefills, decodes = [candidate("p1"), candidate("p2")], [candidate("d1")]
    assert pick(prefills, decodes, avoid={"p1", "d1"}) == Pair("p2", "d1")
    assert pick(prefills[:1], decodes, avoid={"p1", "d1"}) == Pair("p1", "d1")


def test_the_preferred_prefill_is_taken_unless_avoided() -> None:
    prefills, decodes = [candidate("p1"), candidate("p2")], [candidate("d1")]
    assert pick(prefills, decodes, prefer="p2") == Pair("p2", "d1")
    assert pick(prefills, decodes, prefer="p2", avoid={"p2"}) == Pair("p1", "d1")
    assert pick(prefills, decodes, prefer="gone") == Pair("p1", "d1")


def test_load_goes_up_with_attempts_and_back_to_zero() -> None:
    desk = Desk()
    book = desk.dispatcher._load

    def loads() -> dict[str, float]:
        prefills = book.prefill_candidates(desk.registry.named("p1"), 0.0)
        decodes = book.decode_candidates(desk.registry.named("d1"), 0.0)
        return {c.incarnation: c.load for c in [*prefills, *decodes]}

    assert loads() == {"p1": 0, "d1": 0}
    job = desk.submit(max_tokens=8)
    assert loads() == {"p1": 3, "d1": 11}
    desk.tokens(attempt(job).computes, room(job), 0, 50)
    assert loads() == {"p1": 0, "d1": 11}
    desk.dispatcher.cancel(job, desk.now)
    assert loads() == {"p1": 0, "d1": 0}
