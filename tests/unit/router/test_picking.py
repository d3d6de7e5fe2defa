"""A pair of nodes, or one, for an attempt."""

from random import Random
from typing import Any

import pytest

from router.local_prefill import LocalLimits
from router.picking import Full, Pair, Rules, Wish, pick_nodes
from router.policies import cache_aware, round_robin
from tests.unit.router.candidates import candidate, grouped, pick, work

LOCAL = LocalLimits(tokens=20, share=0.9)


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


def test_a_pair_says_what_its_nodes_have_cached() -> None:
    nodes = [candidate("p")], [candidate("d")]
    cached = {"p": 48, "d": 32, "other": 96}
    assert pick(*nodes, cached=cached) == Pair("p", "d", computer_has=48, decode_has=32)
    whole = pick(*nodes, cached=cached, computed_whole=True)
    assert whole == Pair("p", "d", computer_has=0, decode_has=32)


def test_decode_works_alone_on_what_is_short_or_mostly_there() -> None:
    nodes = [candidate("p")], [candidate("d")]
    assert pick(*nodes, known=20, local=LOCAL) == Pair(None, "d")
    assert pick(*nodes, known=21, local=LOCAL) == Pair("p", "d")
    had = pick(*nodes, known=1000, cached={"d": 896}, local=LOCAL)
    assert had == Pair("p", "d", decode_has=896), "less than nine tenths"
    had = pick(*nodes, known=1000, cached={"d": 912}, local=LOCAL)
    assert had == Pair(None, "d", computer_has=912, decode_has=912)
    had = pick(*nodes, known=1000, cached={"d": 912}, local=LOCAL, prefers_pair=True)
    assert had == Pair("p", "d", decode_has=912)
    busy = candidate("d", computes=False)
    assert pick([candidate("p")], [busy], known=20, local=LOCAL) == Pair("p", "d")


def test_decode_takes_what_it_has_also_while_prefill_is_full() -> None:
    full = candidate("p", is_open=False)
    cached = {"d": 96}
    assert pick([full], [candidate("d")], cached=cached, local=LOCAL) == Pair(None, "d", 96, 96)
    assert pick([full], [candidate("d")], local=LOCAL) == Full(frozenset("p"))


def test_a_prompt_waits_for_the_node_that_has_it_where_that_is_the_better_choice() -> None:
    holder, other = candidate("p1", 500, is_open=False), candidate("p2")

    def picked(cached: dict[str, int], *, waits: bool, **wish: Any) -> Pair | Full | None:
        rules = Rules(
            choose_prefill=cache_aware(Random(1)),
            choose_decode=round_robin(),
            local=LocalLimits(tokens=0),
            waits_for_cached=waits,
        )
        wanted = Wish(tokens=100, work=work(1000, cached=cached), **wish)
        return pick_nodes(grouped([holder, other], [candidate("d")]), wanted, rules)

    assert picked({"p1": 512}, waits=True) == Full(frozenset({"p1"}))
    assert picked({"p1": 512}, waits=True, kept={"p1"}) == Full(frozenset({"p1"}))
    assert picked({"p1": 512}, waits=True, avoid={"p1"}) == Pair("p2", "d")
    assert picked({"p1": 512}, waits=False) == Pair("p2", "d")
    assert picked({"p1": 496}, waits=True) == Pair("p2", "d")
    assert picked({}, waits=True) == Pair("p2", "d")


def test_each_decode_node_has_its_turn_though_most_do_not_work_alone() -> None:
    """Asking whether decode had better work alone must not use a turn up."""
    rules = Rules(choose_prefill=round_robin(), choose_decode=round_robin(), local=LOCAL)
    prefills, decodes = [candidate("p")], [candidate("d1"), candidate("d2")]
    taken = []
    for _ in range(4):
        wish = Wish(tokens=100, work=work(100))
        pair = pick_nodes(grouped(prefills, decodes), wish, rules)
        assert isinstance(pair, Pair)
        taken.append(pair.decode)
    assert taken == ["d1", "d2", "d1", "d2"]


def test_without_prefill_nodes_decode_is_alone_where_it_may() -> None:
    decodes = [candidate("d")]
    assert pick([], decodes) is None
    assert pick([], decodes, decode_alone=True, cached={"d": 16}) == Pair(None, "d", 16, 16)
    closed = [candidate("d", computes=False)]
    assert pick([], closed, decode_alone=True) == Full(frozenset("d"))
