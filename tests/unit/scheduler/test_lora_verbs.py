"""Loading and unloading adapters on one node: who is answered what, and when."""

import pytest

from common.events import AdminDone
from common.messages import Abort, Adapter, Failed, FailureKind
from common.modes import PauseMode
from common.plan import (
    AdapterPlaced,
    AdapterRead,
    DropAdapter,
    PlaceAdapter,
    ReadAdapter,
    Write,
    WriteDone,
)
from tests.unit.scheduler.harness import Driven, adapter, destination, generate, prefill


def answered(node: Driven) -> dict[int, AdminDone]:
    return {done.ticket: done for done in node.answers}


def with_running(name: str = "a", room: int = 1, **overrides: object) -> Driven:
    """A prefill node in whose batch a request of adapter `name` computes."""
    node = prefill(**overrides)  # type: ignore[arg-type]
    node.serve(name)
    node.router(generate(room, prompt=20, adapter=adapter(name)))
    node.peer(destination(room, pages=5, name=name), "d")
    node.step()
    node.loader()
    assert node.step().batch is not None
    return node


def writes_end(node: Driven) -> None:
    for write in node.sent(Write):
        node.fact(WriteDone(write.room, write.chunk, 1, 0.1))


def test_a_load_is_answered_with_the_digest_once_it_was_read_and_checked() -> None:
    node = prefill()
    before = node.scheduler.adapters
    node.load("a", ticket=7)
    assert node.step().adapters == (ReadAdapter(1, "/a", ""),)
    assert not node.answers
    assert node.scheduler.adapters is before
    node.loader()
    node.step()
    assert node.answers == [AdminDone(7, True, "adapter 'a' is loaded", "digest of /a")]
    info = node.scheduler.adapters[0]
    assert (info.name, info.digest, info.path, info.rank) == ("a", "digest of /a", "/a", 4)
    assert node.scheduler.adapters is node.scheduler.adapters


def test_a_load_that_fails_says_why_and_leaves_the_name_free() -> None:
    node = prefill()
    node.load("a", ticket=1)
    node.step()
    node.loader(error="DoRA is not supported")
    node.step()
    assert answered(node)[1].message == "adapter 'a': DoRA is not supported"
    assert not answered(node)[1].ok
    node.serve("a", path="/b")
    assert node.scheduler.adapters[0].path == "/b"


def test_what_is_loaded_is_not_loaded_again_unless_its_very_content_is_asked_for() -> None:
    node = prefill()
    node.serve("a")
    node.load("a", ticket=1)
    node.load("a", ticket=2, digest="digest of /a", path="/elsewhere")
    node.load("a", ticket=3, digest="digest of /b", path="/b")
    node.load("a", ticket=4, digest="digest of /a", pinned=True)
    assert not node.step().adapters
    done = answered(node)
    assert [done[ticket].ok for ticket in (1, 2, 3, 4)] == [False, True, False, False]
    assert done[2].digest == "digest of /a"
    assert "adapter 'a' is already loaded" in done[1].message
    assert "already loaded, not pinned" in done[4].message


def test_loads_of_the_same_that_are_under_way_are_one_load() -> None:
    node = prefill()
    node.load("a", ticket=1)
    node.load("a", ticket=2)
    node.load("a", ticket=3, path="/elsewhere")
    node.load("a", ticket=4, digest="digest of /a")
    node.load("a", ticket=5, digest="digest of /b")
    node.step()
    assert len(node.commands) == 1
    node.loader()
    node.step()
    done = answered(node)
    assert [done[ticket].ok for ticket in (1, 2, 3, 4, 5)] == [True, True, False, True, False]
    assert "already loaded" in done[3].message
    assert "already loaded with other content" in done[5].message


def test_a_pinned_adapter_is_answered_once_it_is_placed_and_stays() -> None:
    node = prefill(max_loras_per_batch=2, max_loaded_loras=2)
    node.load("a", ticket=1, pinned=True)
    node.step()
    node.loader()
    assert node.step().adapters == (PlaceAdapter(1, 0),)
    assert not node.answers
    node.loader()
    node.step()
    assert answered(node)[1].ok
    for name in ("b", "c"):
        node.serve(name)
        node.router(generate(ord(name), adapter=adapter(name)))
        node.step()
        node.loader()
        node.router(Abort(ord(name)))
    node.step()
    assert [info.name for info in node.scheduler.adapters] == ["a", "b", "c"]
    assert node.scheduler.stats().lora_slots_used == 2
    assert node.scheduler.counters["lora_slot_changes"] == 1, "only the slot of b was given away"


@pytest.mark.parametrize(("slots", "pins"), [(1, 0), (2, 1), (3, 2)])
def test_pins_that_would_leave_no_slot_are_refused(slots: int, pins: int) -> None:
    node = prefill(max_loras_per_batch=slots, max_loaded_loras=8)
    for number in range(pins):
        node.serve(f"pinned-{number}", pinned=True)
    node.load("one-too-many", ticket=9, pinned=True)
    node.step()
    assert not answered(node)[9].ok
    assert "would starve" in answered(node)[9].message
    node.serve("free")


def test_a_node_without_slots_takes_no_adapter() -> None:
    node = prefill(max_loras_per_batch=0, max_loaded_loras=0)
    node.load("a", ticket=1)
    node.step()
    assert not answered(node)[1].ok
    assert "max_loras_per_batch is 0" in answered(node)[1].message
    assert not list(node.scheduler.adapters)
    node.router(generate(1, adapter=adapter("a")))
    node.step()
    assert node.failures(FailureKind.ADAPTER) == [1]


def test_what_was_never_loaded_cannot_be_unloaded() -> None:
    node = prefill()
    node.unload("a", ticket=1)
    node.step()
    assert answered(node)[1] == AdminDone(1, False, "adapter 'a' was never loaded")


def test_an_unload_waits_for_its_requests_and_refuses_new_ones_at_once() -> None:
    node = with_running()
    node.unload("a", ticket=1)
    node.unload("a", ticket=2)
    node.router(generate(2, adapter=adapter("a")))
    assert not list(node.scheduler.adapters)
    node.load("a", ticket=3)
    node.step()
    assert node.failures(FailureKind.ADAPTER) == [2]
    assert list(answered(node)) == [3], "on its way out, the name is not free yet"
    for _ in range(4):
        node.step()
    writes_end(node)
    node.step()
    assert answered(node)[1].ok
    assert answered(node)[2].ok
    assert node.commands[-1] == DropAdapter(1)


def test_a_name_that_was_unloaded_is_loaded_anew_with_other_content() -> None:
    node = prefill()
    node.serve("a")
    node.unload("a", ticket=1)
    node.step()
    assert answered(node)[1].ok
    node.commands.clear()
    node.load("a", ticket=2, path="/other")
    assert node.step().adapters == (ReadAdapter(2, "/other", ""),)
    node.scheduler.on_adapter(AdapterRead(1, "digest of /a", 4), 0.0)
    assert not list(node.scheduler.adapters), "nothing of the old one answers for it"
    assert node.scheduler.counters["unexpected_adapter_events"] == 1
    node.loader()
    assert node.scheduler.adapters[0].digest == "digest of /other"
    node.router(generate(1, adapter=adapter("a")))
    node.router(generate(2, adapter=Adapter("a", "digest of /other")))
    node.step()
    assert node.failures(FailureKind.ADAPTER) == [1]


def test_an_unload_ends_a_load_that_is_under_way_and_does_not_wait_for_it() -> None:
    node = prefill()
    node.load("a", ticket=1)
    node.step()
    node.unload("a", ticket=2)
    node.load("a", ticket=3, path="/other")
    node.step()
    assert [answered(node)[ticket].ok for ticket in (1, 2)] == [False, True]
    assert "unloaded while it was loading" in answered(node)[1].message
    node.loader()  # the read that nobody wants any more
    assert node.step().adapters == (DropAdapter(1), ReadAdapter(2, "/other", ""))
    node.loader()
    node.step()
    assert answered(node)[3].digest == "digest of /other"
    assert node.scheduler.stats().loras_in_memory == 1


def test_a_pinned_load_that_is_given_up_gives_its_pin_back_at_once() -> None:
    node = prefill(max_loras_per_batch=2)
    node.load("a", pinned=True)
    node.step()
    node.unload("a", ticket=1)
    node.load("b", ticket=2, pinned=True)
    for _ in range(4):
        node.step()
        node.loader()
    node.step()
    assert [answered(node)[ticket].ok for ticket in (1, 2)] == [True, True]
    assert node.scheduler.adapters[0].pinned


def test_an_unload_waits_for_the_copy_into_a_slot() -> None:
    node = prefill()
    node.serve("a")
    node.router(generate(1, adapter=adapter("a")))
    assert node.step().adapters == (PlaceAdapter(1, 0),)
    node.router(Abort(1))
    node.unload("a", ticket=1)
    node.step()
    assert not node.answers
    node.scheduler.on_adapter(AdapterPlaced(1, 0), 0.0)
    node.step()
    assert answered(node)[1].ok
    assert node.scheduler.stats().lora_slots_used == 0


def test_a_pinned_adapter_is_unloaded_and_its_pin_is_free() -> None:
    node = prefill(max_loras_per_batch=2)
    node.serve("a", pinned=True)
    node.unload("a", ticket=1)
    node.step()
    assert answered(node)[1].ok
    node.serve("b", pinned=True)


def test_a_paused_node_loads_and_unloads() -> None:
    node = with_running()
    node.scheduler.pause_generation(PauseMode.IN_PLACE)
    node.load("b", ticket=1)
    node.unload("a", ticket=2)
    for _ in range(3):
        node.step()
        node.loader()
    assert answered(node)[1].ok
    assert 2 not in answered(node), "what is paused in place will still need it"
    node.router(Abort(1))
    writes_end(node)
    node.step()
    assert answered(node)[2].ok


def test_a_leaving_node_answers_no_to_loads_at_once_and_to_unloads_at_its_end() -> None:
    node = prefill()
    node.serve("a")
    node.load("b", ticket=1)
    node.router(generate(1, adapter=adapter("a")))
    assert PlaceAdapter(1, 0) in node.step().adapters
    node.unload("a", ticket=2)
    node.scheduler.leave.begin(node.now)
    node.load("c", ticket=3)
    node.step()
    assert {t: done.ok for t, done in answered(node).items()} == {1: False, 3: False, 2: False}
    assert "leaving" in answered(node)[2].message


def test_when_memory_is_full_of_what_is_used_a_new_one_is_checked_and_dropped() -> None:
    node = with_running(max_loras_per_batch=1, max_loaded_loras=1)
    node.load("b", ticket=1)
    node.step()
    node.loader()
    assert node.step().adapters == (DropAdapter(2),)
    assert answered(node)[1].ok
    assert node.scheduler.stats().loras_in_memory == 1


def test_what_is_being_copied_stays_in_memory_though_nobody_uses_it() -> None:
    node = prefill(max_loras_per_batch=1, max_loaded_loras=1)
    node.serve("a")
    node.router(generate(1, adapter=adapter("a")))
    assert node.step().adapters == (PlaceAdapter(1, 0),)
    node.router(Abort(1))
    node.commands.clear()
    node.load("b")
    node.step()
    node.loader()
    assert node.step().adapters == (DropAdapter(2),)
    node.scheduler.on_adapter(AdapterPlaced(1, 0), node.now)
    node.serve("c")
    assert node.scheduler.counters["lora_evictions"] == 1, "now it may go"


def test_what_nobody_uses_is_driven_out_of_memory_the_least_recently_used_first() -> None:
    node = prefill(max_loras_per_batch=1, max_loaded_loras=2)
    node.serve("a", "b")
    node.router(generate(1, adapter=adapter("a")))
    node.router(Abort(1))
    node.load("c")
    node.step()
    node.loader()
    node.step()
    assert DropAdapter(2) in node.commands
    assert node.scheduler.counters["lora_evictions"] == 1


def test_a_vanished_file_fails_the_requests_that_wait_for_it_and_later_ones_try_again() -> None:
    node = prefill(max_loras_per_batch=1, max_loaded_loras=1)
    node.serve("a", "b")  # a is not in memory any more
    node.router(generate(1, adapter=adapter("a")))
    node.router(generate(2, adapter=adapter("b")))
    assert node.step().adapters[-1] == ReadAdapter(1, "/a", "digest of /a")
    node.loader(error="/a is gone")
    node.step()
    assert node.said(Failed) == [
        Failed(room=1, kind=FailureKind.ADAPTER, message="adapter 'a': /a is gone")
    ]
    assert [req.room for req in node.scheduler.unfinished()] == [2]
    assert [info.name for info in node.scheduler.adapters] == ["a", "b"]
    node.router(Abort(2))
    node.commands.clear()
    node.router(generate(3, adapter=adapter("a")))
    assert node.step().adapters[-1] == ReadAdapter(1, "/a", "digest of /a")


def test_another_content_than_the_registered_one_is_no_substitute() -> None:
    node = prefill(max_loras_per_batch=1, max_loaded_loras=1)
    node.serve("a", "b")
    node.router(generate(1, adapter=adapter("a")))
    node.step()
    node.scheduler.on_adapter(AdapterRead(1, "something else", 4), 0.0)
    assert node.step().adapters == (DropAdapter(1),)
    assert node.failures(FailureKind.ADAPTER) == [1]


def test_prefill_and_decode_must_hold_the_same_content() -> None:
    node = prefill()
    node.serve("a")
    node.router(generate(1, adapter=adapter("a")))
    node.router(generate(2))
    node.router(generate(3, adapter=adapter("a")))
    node.peer(destination(1, name="b"), "d")
    node.peer(destination(2, name="a"), "d")
    node.peer(destination(3), "d")
    node.step()
    assert node.failures(FailureKind.TRANSFER) == [1, 2, 3]
