"""KV is made only for a request that will find a slot: no stream stalls at its second token."""

from common.lifecycle import State
from common.messages import Destination, PeerWelcome, Ping
from decode_node.forecast import SlotForecast
from tests.unit.scheduler.harness import Driven, decode, generate, landed
from tests.unit.scheduler.node_settings import FINGERPRINT


def linked(*rooms: int, prefill: str = "p", slots: int = 2) -> Driven:
    node = decode(num_pages=99, max_running_requests=slots)
    for room in rooms:
        node.router(generate(room, prefill_incarnation=prefill))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), prefill)
    node.step()
    return node


def named(node: Driven) -> list[int]:
    return [sent.room for sent in node.said(Destination)]


def test_pages_are_named_for_as_many_as_there_are_slots() -> None:
    node = linked(1, 2, 3)
    assert named(node) == [1, 2]
    for room in (1, 2):
        node.fact(landed(room))
    node.step()
    assert named(node) == [1, 2], "both run, the third waits without KV"
    for _ in range(8):
        node.step()
    assert named(node) == [1, 2, 3]


def test_those_held_up_by_a_paused_prefill_take_no_slot_from_others() -> None:
    node = linked(1, 2)
    node.peer(Ping(1.0, paused=True), "p")
    node.router(generate(3, prefill_incarnation="q"))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "q")
    node.step()
    assert named(node) == [1, 2, 3]


def test_a_slot_that_is_free_by_then_is_counted_and_parts_of_one_are_not() -> None:
    forecast = SlotForecast(4)
    assert [forecast.slot_awaits(taken) for taken in (3, 4)] == [True, False]
    for now in range(100):
        forecast.note_end(now * 0.5)
        forecast.note_landing(0.7)
    assert [forecast.slot_awaits(taken) for taken in (4, 5)] == [True, False]
    for now in range(100):
        forecast.note_end(50 + now * 2.0)
    assert not forecast.slot_awaits(4), "ends became rare"


def test_a_node_that_runs_less_than_it_may_takes_in_at_once() -> None:
    node = linked(1, 2, 3, slots=8)
    assert named(node) == [1, 2, 3]
    assert len(node.scheduler.queues[State.TRANSFER]) == 3
