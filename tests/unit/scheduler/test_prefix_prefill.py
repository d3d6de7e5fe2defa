"""A prefill node's prefix cache: what it leaves out, and what decode is sent all the same."""

from typing import Any

import pytest

from common.messages import SamplingParams, TokenOutput, Tokens
from common.modes import PauseMode
from common.plan import CacheChanged, StepPlan, Write, WriteDone
from tests.unit.scheduler.harness import Driven, adapter, destination, generate, prefill


def serve(node: Driven, room: int, prompt: list[int], first: int = 0, **fields: Any) -> None:
    """Bring one request to its end; pages of 4 tokens, chunks of 6."""
    node.router(generate(room, prompt_ids=prompt, **fields))
    num_pages = node.scheduler.kv.pages_for(len(prompt))
    named = destination(room, pages=num_pages - first)
    node.peer(type(named)(room=room, pages=named.pages, first_page=first), "d")
    for _ in range(12):
        node.step()
    for write in node.sent(Write):
        if write.room == room:
            node.fact(WriteDone(room, write.chunk, 1, 0.1))
    node.step()
    assert not node.scheduler.unfinished()


def computed(node: Driven, room: int, prompt: list[int], **fields: Any) -> int:
    """How many tokens a request made the node compute."""
    seen: list[StepPlan] = []
    original = node.step

    def watched(token: int = 5) -> StepPlan:
        seen.append(original(token))
        return seen[-1]

    node.step = watched  # type: ignore[method-assign]
    serve(node, room, prompt, **fields)
    node.step = original  # type: ignore[method-assign]
    return sum(plan.batch.num_tokens for plan in seen if plan.batch is not None)


def output_of(node: Driven, room: int) -> TokenOutput:
    output: TokenOutput
    (output,) = (o for tokens in node.said(Tokens) for o in tokens.outputs if o.room == room)
    return output


@pytest.mark.parametrize(
    ("shared", "length", "hit"),
    [(0, 12, 0), (3, 12, 0), (4, 12, 4), (11, 12, 8), (12, 12, 8), (13, 13, 12), (9, 17, 8)],
)
def test_whole_pages_that_are_known_are_not_computed_but_the_last_tokens_always_is(
    shared: int, length: int, hit: int
) -> None:
    node = prefill()
    serve(node, 1, list(range(14)))
    prompt = [*range(shared), *range(50, 50 + length - shared)]
    assert computed(node, 2, prompt) == length - hit
    assert output_of(node, 2).cached_tokens == hit
    assert output_of(node, 1).cached_tokens == 0
    counters = node.scheduler.counters
    assert (counters["cache_queried_tokens"], counters["cache_hit_tokens"]) == (14 + length, hit)


@pytest.mark.parametrize("here", [0, 1, 2, 3])
@pytest.mark.parametrize("there", [0, 1, 2, 3])
def test_decode_is_sent_what_it_lacks_however_much_is_cached_on_either_side(
    here: int, there: int
) -> None:
    node = prefill()
    if here:
        serve(node, 1, [*range(4 * here), 80])
    prompt = list(range(14))
    assert computed(node, 2, prompt, first=there) == 14 - 4 * here
    written = [page for w in node.sent(Write) if w.room == 2 for page in w.target_pages]
    assert written == list(range(4 - there))


def test_cached_pages_leave_in_the_turn_of_admission() -> None:
    node = prefill()
    serve(node, 1, list(range(13)))
    node.transfers.clear()
    node.router(generate(2, prompt_ids=list(range(30))))
    node.peer(destination(2, pages=8), "d")
    plan = node.step()
    (write,) = plan.transfers
    assert isinstance(write, Write)
    assert len(write.source_pages) == 3
    assert plan.batch is not None
    assert plan.batch.rows[0].start == 12
    assert len(plan.batch.rows[0].new_pages) == 8


def test_cached_pages_leave_at_admission_also_when_the_rest_has_to_wait() -> None:
    node = prefill(num_pages=40)
    serve(node, 1, list(range(13)))
    node.transfers.clear()
    node.router(generate(2, prompt_ids=list(range(60, 90)), age_s=1.0))
    node.peer(destination(2, pages=8), "d")
    node.router(generate(3, prompt_ids=list(range(20))))
    node.peer(destination(3, pages=5), "d")
    plan = node.step()
    assert plan.batch is not None
    assert len(plan.batch.rows) == 1, "the first takes the whole step"
    assert [(w.room, len(w.source_pages)) for w in node.sent(Write)] == [(3, 3)]


def test_a_request_that_waits_for_its_turn_profits_from_those_before_it() -> None:
    """Both are let in at once, but only one fits into a step."""
    node = prefill()
    for room in (1, 2):
        node.router(generate(room, prompt_ids=[*range(16), room, room]))
        node.peer(destination(room, pages=5), "d")
    for _ in range(8):
        node.step()
    assert output_of(node, 2).cached_tokens == 16


def test_outputs_of_an_earlier_attempt_are_not_counted_as_cached_prompt() -> None:
    node = prefill()
    serve(node, 1, list(range(14)))
    node.router(
        generate(2, prompt_ids=list(range(6)), output_ids=list(range(6, 13)), max_tokens=20)
    )
    node.peer(destination(2, pages=4), "d")
    for _ in range(3):
        node.step()
    assert output_of(node, 2).cached_tokens == 6


def test_prompt_logprobs_need_the_whole_prompt() -> None:
    node = prefill()
    serve(node, 1, list(range(14)))
    sampling = SamplingParams(max_tokens=8, seed=1, prompt_logprobs=0)
    assert computed(node, 2, list(range(14)), sampling=sampling) == 14


def test_without_a_prefix_cache_everything_is_computed_and_nothing_is_told() -> None:
    node = prefill(prefix_cache=False)
    serve(node, 1, list(range(14)))
    assert computed(node, 2, list(range(14))) == 14
    assert node.scheduler.stats().cached_pages == 0
    assert node.scheduler.kv.take_changes() is None
    assert node.scheduler.counters["cache_queried_tokens"] == 0


def test_routers_are_told_what_is_stored_evicted_and_cleared() -> None:
    node = prefill(num_pages=6)
    told: list[CacheChanged] = []
    original = node.step

    def listening(token: int = 5) -> StepPlan:
        plan = original(token)
        told.extend(m for m in plan.messages if isinstance(m, CacheChanged))
        return plan

    node.step = listening  # type: ignore[method-assign]
    serve(node, 1, list(range(14)))
    stored = [key for change in told for key in change.stored]
    assert len(stored) == 3
    assert node.scheduler.stats().cached_pages == 3
    assert node.scheduler.stats().free_pages == 6
    told.clear()
    serve(node, 2, list(range(40, 60)))
    evicted = [key for change in told for key in change.evicted]
    assert evicted == stored[:0:-1], "the last pages of the chain, the last of all first"
    assert node.scheduler.counters["cache_evictions"] == 2
    told.clear()
    assert node.scheduler.flush_cache() is None
    node.step()
    assert told == [CacheChanged(cleared=True)]


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
def test_nothing_computed_before_such_a_pause_is_used_after_it(mode: PauseMode) -> None:
    node = prefill()
    serve(node, 1, list(range(14)))
    node.router(generate(2, prompt_ids=list(range(30))))
    node.peer(destination(2, pages=8), "d")
    node.step()
    node.scheduler.pause_generation(mode)  # its first pages are being read by a write
    node.step()
    assert node.scheduler.stats().cached_pages == 0
    assert node.scheduler.kv.num_free < 24, "what a write reads stays"
    for write in node.sent(Write):
        if write.room == 2:
            node.fact(WriteDone(2, write.chunk, 1, 0.1))
    node.step()
    assert node.scheduler.kv.num_free == 24
    node.scheduler.continue_generation()
    assert computed(node, 3, list(range(14))) == 14


def test_in_place_keeps_the_cache() -> None:
    node = prefill()
    serve(node, 1, list(range(14)))
    node.scheduler.pause_generation(PauseMode.IN_PLACE)
    node.scheduler.continue_generation()
    assert computed(node, 2, list(range(14))) == 2


def test_a_flush_waits_for_nobody_it_says_who_is_in_the_way() -> None:
    node = prefill()
    node.router(generate(1, prompt_ids=list(range(14))))
    node.peer(destination(1, pages=4), "d")
    node.step()
    assert node.scheduler.flush_cache() == "1 requests hold pages, 0 are quarantined"
    assert node.scheduler.stats().cached_pages == 1


def test_a_cache_of_another_adapter_or_weight_version_is_another_cache() -> None:
    node = prefill()
    node.serve("a", "b")
    prompt = list(range(14))
    for room, name, expected in ((1, "a", 14), (2, "b", 14), (3, "a", 2), (4, "", 14)):
        num_pages = node.scheduler.kv.pages_for(len(prompt))
        fields: dict[str, Any] = {"adapter": adapter(name)} if name else {}
        node.router(generate(room, prompt_ids=prompt, **fields))
        node.peer(destination(room, pages=num_pages, name=name), "d")
        for _ in range(12):
            node.step()
            node.loader()
        assert output_of(node, room).cached_tokens == 14 - expected
