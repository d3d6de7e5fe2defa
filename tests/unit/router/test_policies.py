"""Choosing nodes, and the load that choices go by."""

from collections import Counter
from random import Random

import pytest

from router.config import PolicyName
from router.policies import (
    Candidate,
    Work,
    cache_aware,
    least_loaded,
    make_choice,
    power_of_two,
    round_robin,
)
from tests.unit.router.candidates import candidate, work
from tests.unit.router.desk import Desk, attempt, room


def test_round_robin_takes_turns_also_when_nodes_come_and_go() -> None:
    choose, any_work = round_robin(), work()
    a, b, c = candidate("a"), candidate("b"), candidate("c")
    assert [choose([a, b], any_work).incarnation for _ in range(4)] == ["a", "b", "a", "b"]
    assert choose([a, b, c], any_work).incarnation == "c"
    assert choose([a, c], any_work).incarnation == "a"


def test_least_loaded_takes_the_smallest_and_draws_among_equals() -> None:
    choose = least_loaded(Random(1))
    nodes = [candidate("a", 5), candidate("b", 2), candidate("c", 2)]
    assert {choose(nodes, work()).incarnation for _ in range(40)} == {"b", "c"}


def test_random_reaches_all() -> None:
    choose = make_choice("random", Random(1))
    nodes = [candidate(n, 9) for n in "abc"]
    assert {choose(nodes, work()).incarnation for _ in range(60)} == set("abc")


def test_power_of_two_never_takes_the_most_loaded_and_is_nearly_even() -> None:
    choose = power_of_two(Random(1))
    nodes = [candidate("a", 9), candidate("b", 5), candidate("c", 2)]
    taken = Counter(choose(nodes, work()).incarnation for _ in range(300))
    assert set(taken) == {"b", "c"}
    assert taken["c"] > taken["b"]
    assert choose(nodes[:1], work()).incarnation == "a"


# ---------------------------------------------------------------- cache-aware


def chosen(nodes: list[Candidate], known: int = 1000, **cached: int) -> str:
    return cache_aware(Random(1))(nodes, work(known, cached=cached)).incarnation


def test_the_holder_of_the_prefix_is_taken() -> None:
    nodes = [candidate(n) for n in "abc"]
    assert chosen(nodes, b=512) == "b"
    assert chosen(nodes, a=256, b=512, c=496) == "b"


def test_what_is_cached_is_worth_as_much_work_as_it_saves() -> None:
    """A holder loses to an idle node when more waits there than the prefix saves."""
    assert chosen([candidate("a", 511), candidate("b")], a=512) == "a"
    assert chosen([candidate("a", 513), candidate("b")], a=512) == "b"


def test_with_a_weight_a_holder_is_kept_until_more_waits_there_than_so_many_times_its_prefix() -> (
    None
):
    choose = cache_aware(Random(1), 4.0)
    for waiting, taken in ((4 * 512 - 1, "a"), (4 * 512 + 1, "b")):
        nodes = [candidate("a", waiting), candidate("b")]
        assert choose(nodes, work(1000, cached={"a": 512})).incarnation == taken


def test_without_anything_cached_it_is_the_load_then_the_share_of_recent_work() -> None:
    assert chosen([candidate("a", 5), candidate("b", 2)]) == "b"
    assert chosen([candidate("a", recent=10), candidate("b", recent=9)]) == "b"
    choose, nodes = cache_aware(Random(1)), [candidate("a"), candidate("b")]
    assert {choose(nodes, work()).incarnation for _ in range(40)} == {"a", "b"}


def test_more_than_its_share_of_recent_work_takes_credit_for_the_cache_only() -> None:
    busy = candidate("a", recent=10_000)
    assert chosen([busy, candidate("b")], a=512) == "b"
    fair = [candidate("a", recent=1200), candidate("b", recent=1000)]
    assert chosen(fair, a=512) == "a"
    assert chosen([busy, candidate("b", 1)]) == "a", "no cache, no credit to lose: load decides"


def test_a_prefix_is_not_looked_up_for_policies_that_do_not_ask() -> None:
    def looked_up(name: PolicyName) -> bool:
        asked = False

        def find() -> dict[str, int]:
            nonlocal asked
            asked = True
            return {}

        make_choice(name, Random(1))([candidate("a"), candidate("b")], Work(10, find=find))
        return asked

    assert looked_up("cache_aware")
    assert not any(
        looked_up(name) for name in ("random", "round_robin", "least_loaded", "power_of_two")
    )


# ---------------------------------------------------------------- sessions


def homes(nodes: list[Candidate], sessions: int = 400) -> dict[int, str]:
    choose = make_choice("least_loaded", Random(1))
    return {i: choose(nodes, work(session=f"s{i}")).incarnation for i in range(sessions)}


@pytest.mark.parametrize("count", [2, 5, 16])
def test_sessions_spread_evenly_and_stay(count: int) -> None:
    nodes = [candidate(f"n{i}") for i in range(count)]
    first = homes(nodes, 200 * count)
    assert first == homes(nodes[::-1], 200 * count), "the order of nodes does not matter"
    taken = Counter(first.values())
    assert len(taken) == count
    assert max(taken.values()) < 1.5 * 200
    assert min(taken.values()) > 0.5 * 200


def test_only_the_sessions_of_a_lost_node_move() -> None:
    nodes = [candidate(f"n{i}") for i in range(5)]
    before, after = homes(nodes), homes(nodes[1:])
    moved = {i for i in before if before[i] != after[i]}
    assert moved == {i for i in before if before[i] == "n0"}
    assert len({after[i] for i in moved}) == 4, "they are spread over the others"


def test_an_overloaded_home_sends_its_session_to_the_next_one() -> None:
    choose, name = make_choice("cache_aware", Random(1)), "some session"
    nodes = [candidate(f"n{i}", load=1000) for i in range(5)]
    home = choose(nodes, work(session=name))
    home.load = 1400
    assert choose(nodes, work(session=name)) is home, "a prompt more than its share"
    home.load = 5000
    other = choose(nodes, work(session=name))
    assert other is not home
    assert choose(nodes, work(session=name)) is other, "and always to the same one"


def test_load_goes_up_with_attempts_and_back_to_zero() -> None:
    desk = Desk()
    book = desk.dispatcher._load

    def loads() -> dict[str, float]:
        book.settle(0.0)
        return {node.incarnation: book.candidate(node).load for node in desk.registry.all()}

    assert loads() == {"p1": 0, "d1": 0}
    job = desk.submit(max_tokens=8)
    assert loads() == {"p1": 3, "d1": 11}
    desk.tokens(attempt(job).computes, room(job), 0, 50)
    assert loads() == {"p1": 0, "d1": 11}
    desk.dispatcher.cancel(job, desk.now)
    assert loads() == {"p1": 0, "d1": 0}
