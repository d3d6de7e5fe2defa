"""Who computes with an adapter, and who waits for a slot: on both nodes, request by request."""

from typing import Any

import pytest

from common.lifecycle import State
from common.messages import Abort, Destination, FailureKind, PeerWelcome, Ping, Retracted
from common.modes import PauseMode
from common.plan import AdapterPlaced, PlaceAdapter, ReadAdapter, WriteDone
from prefill_node.scheduler import PrefillScheduler
from tests.unit.scheduler.harness import (
    Driven,
    adapter,
    decode,
    destination,
    generate,
    landed,
    prefill,
)
from tests.unit.scheduler.node_settings import FINGERPRINT


def prefilling(slots: int = 1, *names: str, **overrides: Any) -> Driven:
    node = prefill(num_pages=60, max_loras_per_batch=slots, **overrides)
    node.serve(*names)
    return node


def decoding(slots: int = 1, *names: str, **overrides: Any) -> Driven:
    """A decode node, linked to prefill `p`, that serves adapters."""
    node = decode(num_pages=99, max_loras_per_batch=slots, **overrides)
    node.serve(*names)
    node.router(generate(999))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.router(Abort(999))
    node.step()
    return node


def arrive(node: Driven, room: int, name: str = "", **fields: Any) -> None:
    """A request, on prefill with its destination."""
    prompt = fields.setdefault("prompt", 6)
    node.router(generate(room, adapter=adapter(name) if name else None, **fields))
    if isinstance(node.scheduler, PrefillScheduler):
        node.peer(destination(room, pages=-(-prompt // 4), name=name), "d")


def named(node: Driven) -> list[int]:
    return [sent.room for sent in node.said(Destination)]


def rows(node: Driven) -> list[tuple[int, int | None]]:
    """Of the next step: how many tokens each row has, and with which slot it is computed."""
    batch = node.step().batch
    return [] if batch is None else [(len(row.token_ids), row.lora_slot) for row in batch.rows]


# ---------------------------------------------------------------- prefill


def test_prefill_computes_with_the_slot_that_was_filled_and_not_before() -> None:
    node = prefilling(2, "a", "b")
    arrive(node, 1, "b")
    arrive(node, 2)
    arrive(node, 3, "a")
    assert rows(node) == [(6, None)], "the base model waits for nothing"
    assert node.commands == [PlaceAdapter(2, 0), PlaceAdapter(1, 1)]
    assert rows(node) == []
    node.loader()
    assert rows(node) == [(6, 0)]
    assert rows(node) == [(6, 1)]


def test_on_prefill_one_without_a_slot_does_not_hold_back_those_behind_it() -> None:
    node = prefilling(1, "a", "b")
    arrive(node, 1, "a", prompt=20)
    node.step()
    node.loader()
    assert rows(node) == [(6, 0)]
    arrive(node, 2, "b")
    arrive(node, 3)
    arrive(node, 4, "a")
    for _ in range(3):
        node.step()
    assert {r.room for r in node.scheduler.queues[State.WAITING]} == {2}
    assert node.commands == [], "the slot is not given away while a chunked prompt needs it"
    for _ in range(6):
        node.step()
    assert PlaceAdapter(2, 0) in node.commands


def test_a_slot_that_is_being_filled_is_given_to_nobody_else() -> None:
    node = prefilling(1, "a", "b")
    arrive(node, 1, "a")
    node.step()
    node.router(Abort(1))
    arrive(node, 2, "b")
    for _ in range(3):
        node.step()
    assert node.commands == [PlaceAdapter(1, 0)]
    node.scheduler.on_adapter(AdapterPlaced(1, 0), node.now)
    node.step()
    assert node.commands[-1] == PlaceAdapter(2, 0)


def test_a_request_gets_the_slot_that_was_filled_for_it_before_anybody_else_may_take_it() -> None:
    """One that is before it in rank comes meanwhile, and would take the idle slot again."""
    node = prefilling(1, "a", "b")
    arrive(node, 1, "b")
    node.step()
    arrive(node, 2, "a", priority=-1)
    node.loader()
    assert rows(node) == [(6, 0)]
    node.step()
    assert node.commands[-1] == PlaceAdapter(1, 0)


def test_the_idle_slot_that_was_used_least_recently_is_given_away_first() -> None:
    node = prefilling(2, "a", "b", "c")
    for room, name in ((1, "a"), (2, "b"), (3, "a")):
        arrive(node, room, name)
        node.step()
        node.loader()
        node.step()
    arrive(node, 4, "c")
    node.step()
    assert node.commands == [PlaceAdapter(3, 1)]


def test_a_slot_whose_adapter_is_wanted_is_spared_while_another_is_idle() -> None:
    node = prefilling(2, "a", "b", "c")
    for room, name in ((1, "a"), (2, "b")):
        arrive(node, room, name)
        node.step()
        node.loader()
        node.step()
        node.step()
        node.fact(WriteDone(room, 0, 2, 0.1))
    node.router(generate(5, adapter=adapter("a")))  # its destination is not known yet
    arrive(node, 6, "c")
    node.step()
    assert node.commands == [PlaceAdapter(3, 1)]


def test_what_is_not_in_memory_is_read_again_before_it_is_placed() -> None:
    node = prefilling(1, "a", "b", max_loaded_loras=1)
    arrive(node, 1, "a")
    assert ReadAdapter(1, "/a", "digest of /a") in node.step().adapters
    node.loader()
    assert node.step().adapters == (PlaceAdapter(1, 0),)
    node.loader()
    assert rows(node) == [(6, 0)]
    assert node.scheduler.stats().loras_in_memory == 1


def test_prefill_fetches_ahead_only_into_a_slot_that_nobody_needs() -> None:
    node = prefilling(1, "a", "b")
    node.router(generate(1, adapter=adapter("a")))
    assert node.step().adapters == (PlaceAdapter(1, 0),), "before its destination is known"
    node.loader()
    node.router(generate(2, adapter=adapter("b")))
    assert node.step().adapters == (), "a is needed soon"
    node.peer(destination(2, name="b"), "d")
    assert node.step().adapters == (PlaceAdapter(2, 0),), "b is needed now"


# ---------------------------------------------------------------- decode


def test_decode_makes_kv_only_for_what_will_find_a_slot() -> None:
    node = decoding(1, "a", "b")
    arrive(node, 1, "a")
    arrive(node, 2, "b")
    arrive(node, 3)
    arrive(node, 4, "a")
    node.step()
    assert named(node) == [1, 3, 4], "while the slot is being filled, the KV may be made"
    node.fact(landed(1))
    node.fact(landed(3))
    assert rows(node) == [(1, None)]
    node.loader()
    assert sorted(rows(node), key=str) == [(1, 0), (1, None)]


def test_on_decode_a_slot_is_held_from_the_naming_of_pages_until_the_last_token() -> None:
    node = decoding(1, "a", "b")
    arrive(node, 1, "a", max_tokens=4)
    arrive(node, 2, "b")
    node.step()
    node.loader()
    node.step()
    assert named(node) == [1], "TRANSFER holds it"
    node.scheduler.pause_generation(PauseMode.IN_PLACE)
    node.fact(landed(1))
    node.step()
    assert named(node) == [1], "WAITING holds it"
    node.scheduler.continue_generation()
    for _ in range(2):
        assert rows(node) == [(1, 0)]
        assert named(node) == [1], "RUNNING holds it"
    assert rows(node) == [(1, 0)]
    node.step()
    assert named(node) == [1, 2], "it has finished"


def test_one_held_up_by_a_paused_prefill_holds_no_slot() -> None:
    node = decoding(1, "a", "b")
    arrive(node, 1, "a")
    node.step()
    node.loader()
    node.peer(Ping(1.0, paused=True), "p")
    arrive(node, 2, "b", prefill_incarnation="q")
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "q")
    node.step()
    node.loader()
    node.step()
    assert named(node) == [1, 2]
    node.fact(landed(2, source="q"))
    assert rows(node) == [(1, 0)]
    node.peer(Ping(2.0, paused=False), "p")
    node.fact(landed(1))
    node.router(Abort(2))
    node.step()
    node.loader()
    assert rows(node) == [(1, 0)], "its KV came, and its adapter again"


def test_a_copy_that_fails_fails_what_waits_for_it_wherever_it_waits() -> None:
    node = decoding(1, "a", "b")
    for room in (1, 2):
        arrive(node, room, "a")
    arrive(node, 3, "b")
    node.step()
    node.fact(landed(2))
    node.loader(error="out of memory")
    node.step()
    assert sorted(node.failures(FailureKind.ADAPTER)) == [1, 2]
    assert node.commands[-1] == PlaceAdapter(2, 0), "the slot is free for others"


def test_retraction_under_pressure_leaves_slots_consistent() -> None:
    node = decode(num_pages=8, max_loras_per_batch=2)
    node.serve("a", "b")
    for room, name in ((1, "a"), (2, "b"), (3, "a")):
        node.router(generate(room, max_tokens=20, adapter=adapter(name)))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.step()
    node.loader()
    for room in (1, 2, 3):
        node.fact(landed(room))
    for _ in range(15):
        node.step()
    assert node.said(Retracted)
    assert node.scheduler.stats().running_loras.keys() == {
        req.adapter.name for req in node.scheduler.unfinished()
    }


@pytest.mark.parametrize("name", ["", "a"])
def test_a_request_says_how_long_its_adapter_kept_it_waiting(name: str) -> None:
    node = decoding(1, "a")
    arrive(node, 1, name)
    node.step()
    node.fact(landed(1))
    node.step()
    node.now += 2.5
    node.loader()
    node.step()
    waits = [s.seconds for s in node.scheduler.take_report().samples if s.stage == "adapter_wait"]
    assert waits == ([2.5] if name else [])
