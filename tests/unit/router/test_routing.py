"""Requests go where their prefix is, and the load stays even all the same."""

from collections import Counter
from random import Random

import pytest

from common.messages import FailureKind, StopReason
from router.local_prefill import LocalLimits
from router.node import Loss
from router.protocol.terms import Terms
from router.requests import Job
from tests.unit.router.desk import Desk, attempt, room

SYSTEM = [7 + i % 50 for i in range(2048)]


def cluster(prefills: int, decodes: int, **settings: object) -> Desk:
    desk = Desk("", policy="cache_aware", **settings)  # type: ignore[arg-type]
    for role, count in (("p", prefills), ("d", decodes)):
        for i in range(count):
            desk.join(f"{role}{i + 1}", num_pages=100_000)
    return desk


def tokens(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(100, 1000) for _ in range(count)]


def answer(desk: Desk, job: Job) -> None:
    """The whole output in one go; then both nodes have the prompt cached."""
    first = attempt(job)
    desk.tokens(first.computes, first.room, 0, 50)
    desk.tokens(
        first.decode, first.room, 0, *[50] * job.sampling.max_tokens, finish=StopReason.LENGTH
    )
    for node in first.nodes:
        desk.caches(node, job.prompt_ids)


def test_a_conversation_stays_on_its_nodes() -> None:
    desk = cluster(4, 4)
    places = set()
    history = tokens(1, 500)
    for turn in range(5):
        for other in range(3):  # others talk in between
            answer(desk, desk.submit(token_ids=tokens(100 + 10 * turn + other, 400)))
        job = desk.submit(token_ids=history)
        places.add((attempt(job).prefill, attempt(job).decode))
        answer(desk, job)
        history = [*history, *tokens(turn + 2, 100)]
    assert len(places) == 1


def test_an_overloaded_holder_loses_to_an_idle_node() -> None:
    desk = cluster(2, 2)
    prefix = tokens(1, 600)
    first = desk.submit(token_ids=prefix)
    holder = attempt(first).computes
    answer(desk, first)
    assert attempt(desk.submit(token_ids=[*prefix, *tokens(2, 30)])).computes == holder
    desk.beat(holder, queued_tokens=5000, queues={"waiting": 9})  # another router's work
    assert attempt(desk.submit(token_ids=[*prefix, *tokens(3, 30)])).computes != holder


@pytest.mark.parametrize("at_once", [1, 8, 64])
@pytest.mark.parametrize("nodes", [2, 4])
def test_no_hot_spot_when_all_share_one_system_prompt(nodes: int, at_once: int) -> None:
    desk = cluster(nodes, nodes)
    given: Counter[str] = Counter()
    for burst in range(400 // at_once):
        jobs = [
            desk.submit(token_ids=SYSTEM + tokens(1000 * burst + i, 100)) for i in range(at_once)
        ]
        while waiting := [job for job in jobs if job.outcome == ""]:
            for job in waiting:
                if job.attempt is not None:
                    given.update(attempt(job).nodes)
                    answer(desk, job)
    for role in "pd":
        counts = [count for name, count in given.items() if name[0] == role]
        assert len(counts) == nodes
        assert max(counts) <= 1.5 * min(counts), given


def test_a_hot_prefix_is_computed_once_on_each_node_and_no_more() -> None:
    desk = cluster(4, 4)
    computed = 0
    for i in range(200):
        job = desk.submit(token_ids=SYSTEM + tokens(i, 100))
        computed += desk.dispatcher._load._shares[room(job)].to_compute
        answer(desk, job)
    assert computed <= 4 * len(SYSTEM) + 200 * 120


def test_what_waits_on_a_node_is_what_it_has_to_compute() -> None:
    desk = cluster(1, 1)
    answer(desk, desk.submit(token_ids=SYSTEM))
    job = desk.submit(token_ids=[*SYSTEM, *tokens(1, 10)])
    assert desk.dispatcher.backlog().queued_tokens == 10
    desk.tokens("p1", room(job), 0, 50)
    assert desk.dispatcher.backlog().queued_tokens == 0


def test_a_prompt_whose_logprobs_are_wanted_counts_whole() -> None:
    desk = cluster(1, 1)
    answer(desk, desk.submit(token_ids=SYSTEM))
    desk.submit(token_ids=SYSTEM, prompt_logprobs=1)
    assert desk.dispatcher.backlog().queued_tokens == len(SYSTEM)


def test_a_replay_goes_back_to_the_prefill_that_has_the_prefix() -> None:
    desk = cluster(4, 4)
    prompt = tokens(1, 300)
    job = desk.submit(token_ids=prompt)
    first = attempt(job)
    desk.tokens(first.computes, first.room, 0, 50)
    desk.caches(first.computes, prompt)
    desk.retract(first.decode, first.room)
    assert attempt(job).computes == first.computes
    assert attempt(job).decode != first.decode


def test_a_lost_nodes_pages_attract_nobody() -> None:
    desk = cluster(2, 1)
    prompt = tokens(1, 300)
    job = desk.submit(token_ids=prompt)
    holder = attempt(job).computes
    answer(desk, job)
    desk.cache.leave(holder)
    desk.lose(holder, Loss.SILENT)
    assert attempt(desk.submit(token_ids=prompt)).computes != holder
    (lineage,) = desk.registry.fleet.lineages
    assert desk.cache.match(job.page_keys.of_prefix(lineage, prompt)) == {"d1": 18}


def test_decode_goes_on_alone_with_a_conversation_it_holds() -> None:
    desk = cluster(1, 2, local=LocalLimits(tokens=32, share=0.9))
    prompt = tokens(1, 300)
    first = desk.submit(token_ids=prompt)
    home = attempt(first).decode
    assert attempt(first).prefill == "p1"
    answer(desk, first)
    second = attempt(desk.submit(token_ids=[*prompt, *tokens(2, 20)]))
    assert (second.prefill, second.decode) == (None, home)


def test_sessions_go_by_their_name_and_replays_too() -> None:
    desk = cluster(4, 4)
    terms = Terms(session="alice")
    jobs = [desk.submit(token_ids=tokens(i, 50), terms=terms) for i in range(5)]
    places = {(attempt(job).prefill, attempt(job).decode) for job in jobs}
    assert len(places) == 1
    job, (prefill, decode) = jobs[0], places.pop()
    desk.fail(decode, room(job), FailureKind.ENGINE)
    desk.tick(1.0)
    assert attempt(job).prefill == prefill
    assert attempt(job).decode != decode, "it failed there"
