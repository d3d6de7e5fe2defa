"""A decode node that computes prompts itself, beside what it runs."""

from typing import Any

import pytest

from common.lifecycle import PREFILL_EDGES, State
from common.messages import (
    Abort,
    Aborted,
    Destination,
    Failed,
    FailureKind,
    PeerWelcome,
    Retracted,
    StopReason,
    TokenOutput,
    Tokens,
)
from common.modes import PauseMode
from common.plan import StepPlan
from decode_node.scheduler import DecodeScheduler
from tests.unit.scheduler.harness import Driven, adapter, decode, generate, landed, running
from tests.unit.scheduler.node_settings import FINGERPRINT, settings
from tests.unit.scheduler.world import World


def alone(room: int, prompt: int = 6, **fields: Any) -> Any:
    return generate(room, prompt, prefill_incarnation="", prefill_address="", **fields)


def node(budget: int = 3, **overrides: Any) -> Driven:
    """A decode node that takes `budget` prompt tokens beside a running batch, else 6. It computes
    all of them: the prompts here begin alike."""
    driven = decode(**{"prefix_cache": False} | overrides)
    assert isinstance(driven.scheduler, DecodeScheduler)
    driven.scheduler._local._beside = budget
    return driven


def shape(plan: StepPlan) -> list[tuple[int, int, bool]]:
    """(first position, tokens, draws) of each row."""
    rows = () if plan.batch is None else plan.batch.rows
    return [(row.start, len(row.token_ids), row.sample_index is not None) for row in rows]


def outputs(driven: Driven, room: int) -> list[TokenOutput]:
    said = [output for tokens in driven.said(Tokens) for output in tokens.outputs]
    return [output for output in said if output.room == room]


def test_it_needs_no_link_and_names_pages_to_nobody() -> None:
    driven = node()
    driven.router(alone(1, prompt=5, max_tokens=3))
    assert shape(driven.step()) == [(0, 5, True)]
    assert shape(driven.step()) == [(5, 1, True)]
    driven.step()
    driven.step()
    assert [(out.index, out.finish) for out in outputs(driven, 1)] == [
        (0, None), (1, None), (2, StopReason.LENGTH),
    ]  # fmt: skip
    assert not driven.said(Destination)
    assert not driven.to_peer
    assert driven.scheduler.kv.num_free == 24


def test_beside_a_running_batch_a_step_takes_only_the_budget() -> None:
    driven = node(budget=3)
    running(driven, 1, max_tokens=30)
    driven.router(alone(2, prompt=8))
    driven.router(alone(3, prompt=4))
    chunks = [shape(driven.step())[1:] for _ in range(4)]
    assert chunks == [
        [(0, 3, False)],
        [(3, 3, False)],
        [(6, 2, True), (0, 1, False)],
        [(8, 1, True), (1, 3, True)],
    ], "first in rank first, and what is computed runs along"


def test_where_nobody_runs_a_step_takes_a_whole_chunk() -> None:
    driven = node(budget=1)
    driven.router(alone(1, prompt=13))
    assert [shape(driven.step()) for _ in range(3)] == [
        [(0, 6, False)], [(6, 6, False)], [(12, 1, True)],
    ]  # fmt: skip


def test_only_what_generates_is_the_running_batch() -> None:
    driven = node()
    driven.router(alone(1, prompt=13))
    driven.step()
    assert len(driven.scheduler.running_batch) == 0
    assert driven.scheduler.stats().queues["prefilling"] == 1
    driven.step()
    driven.step()
    assert [req.room for req in driven.scheduler.running_batch] == [1]


def test_a_first_token_that_ends_it_ends_it() -> None:
    driven = node()
    driven.router(alone(1, prompt=5, max_tokens=1))
    driven.router(alone(2, prompt=5, stop=(5,)))
    for _ in range(3):
        driven.step()
    assert [out.finish for room in (1, 2) for out in outputs(driven, room)] == [
        StopReason.LENGTH, StopReason.STOP,
    ]  # fmt: skip
    assert driven.scheduler.is_empty


def test_a_replay_goes_on_after_what_was_emitted() -> None:
    driven = node()
    driven.router(alone(1, prompt=4, output_ids=[7, 8], max_tokens=4, attempt=2))
    plan = driven.step()
    assert shape(plan) == [(0, 6, True)]
    assert plan.batch is not None
    assert plan.batch.rows[0].sample_index == 2
    driven.step()
    driven.step()
    assert [out.index for out in outputs(driven, 1)] == [2, 3]


@pytest.mark.parametrize("mode", PauseMode)
def test_while_paused_no_chunk_is_computed(mode: PauseMode) -> None:
    driven = node()
    driven.router(alone(1, prompt=13))
    driven.step()
    driven.scheduler.pause_generation(mode)
    driven.router(alone(2, prompt=13))
    assert driven.step().batch is None
    held = driven.scheduler.kv.num_pages - driven.scheduler.kv.num_free
    assert held == (0 if mode.empties_node else 8), "two prompts of four pages, or nothing"
    told = {PauseMode.RETRACT: [Retracted(1)], PauseMode.ABORT: [Aborted(1)]}
    assert [m for m in driven.to_router if not isinstance(m, Tokens)] == told.get(mode, [])
    driven.scheduler.continue_generation()
    for _ in range(6):
        driven.step()
    assert outputs(driven, 2)


def test_an_abort_in_mid_prefill_gives_pages_and_slot_back_at_once() -> None:
    driven = node(max_running_requests=1)
    driven.router(alone(1, prompt=13))
    driven.router(alone(2, prompt=13))
    driven.step()
    assert [req.room for req in driven.scheduler.queues[State.PREALLOC]] == [2]
    driven.router(Abort(1))
    assert driven.scheduler.kv.num_free == 24
    assert shape(driven.step()) == [(0, 6, False)]


def test_a_failed_step_fails_its_chunks_too() -> None:
    driven = node()
    driven.router(alone(1, prompt=13))
    driven.scheduler.schedule(driven.now)
    driven.scheduler.process_batch_failure("planted", driven.now)
    driven.step()
    assert driven.failures(FailureKind.ENGINE) == [1]
    assert driven.scheduler.is_empty


def test_under_memory_pressure_the_last_in_rank_goes_also_if_it_only_prefills() -> None:
    driven = node(budget=1, num_pages=7)
    running(driven, 1, max_tokens=20)
    driven.router(alone(2, prompt=16, max_tokens=2))
    for _ in range(20):
        driven.step()
    assert driven.said(Retracted) == [Retracted(2)]
    assert [out.finish for out in outputs(driven, 1)][-1] is StopReason.LENGTH


def test_it_takes_no_slot_from_whose_kv_is_here_already() -> None:
    driven = node(max_running_requests=2)
    for room in (1, 2):
        driven.router(generate(room, max_tokens=4))
    driven.step()
    driven.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    driven.step()
    driven.fact(landed(1))
    driven.fact(landed(2))
    driven.router(alone(3, age_s=9.0))
    driven.step()
    assert len(driven.scheduler.running_batch) == 2
    for _ in range(4):
        driven.step()
    assert outputs(driven, 3)


def test_it_waits_for_its_adapter_and_holds_up_nobody_meanwhile() -> None:
    driven = node()
    driven.serve("a")
    driven.router(alone(1, prompt=13, adapter=adapter("a")))
    driven.router(alone(2, prompt=5))
    assert shape(driven.step()) == [(0, 5, True)]
    driven.loader()  # the slot is filled
    plan = driven.step()
    assert plan.batch is not None
    assert [row.lora_slot for row in plan.batch.rows] == [None, 0]


def test_a_leaving_node_finishes_what_it_prefills_and_hands_over_what_waits() -> None:
    driven = node(max_running_requests=1)
    driven.router(alone(1, prompt=13, max_tokens=2))
    driven.router(alone(2))
    driven.step()
    driven.scheduler.leave.begin(driven.now)
    for _ in range(5):
        driven.step()
    assert driven.said(Retracted) == [Retracted(2)]
    assert not driven.said(Failed)
    assert [out.index for out in outputs(driven, 1)] == [0, 1]
    assert driven.scheduler.is_empty


def test_a_prefill_node_still_has_no_running_batch() -> None:
    assert State.RUNNING not in PREFILL_EDGES
    assert all(State.RUNNING not in after for after in PREFILL_EDGES.values())


def test_long_prompts_starve_nobody_and_are_not_starved() -> None:
    """One after the other comes in while streams run; all texts are the undisturbed ones."""
    world = World(5, prefills=0, decodes=1, pages=60, local=1.0)
    for n in range(24):
        world.router.submit([n % 7] * (1 + 11 * n % 37), 3 + n % 9)
        world.tick()
    world.settle()
    world.router.check()
    assert all(client.end is not None for client in world.router.clients)


def test_without_a_prefill_node_everything_goes_on_and_with_one_it_helps_again() -> None:
    world = World(6, prefills=1, decodes=1, pages=60, local=1e-9)
    name = world.prefills()[0]
    for n in range(6):
        world.router.submit([n, n + 1] * 9, 12)
    for _ in range(3):
        world.tick()
    world.kill(name)
    for n in range(6):
        world.router.submit([n, n + 2] * 9, 12)
    for _ in range(8):
        world.tick()
    decoder = world.nodes[world.decodes()[0]].scheduler
    computed_alone = decoder.counters["local_prefill_tokens"]
    assert computed_alone > 0
    world.settle()
    name = world.add_prefill()
    computed_alone = decoder.counters["local_prefill_tokens"]
    world.router.submit([1, 2] * 9, 12)
    world.settle()
    world.router.check()
    assert decoder.counters["local_prefill_tokens"] == computed_alone


def test_settings_have_both_budgets() -> None:
    chosen = settings("d", 8, chunk_size=40)
    local = DecodeScheduler(chosen, local_chunk_size=7)._local
    assert (local._beside, local._alone) == (7, 40)
