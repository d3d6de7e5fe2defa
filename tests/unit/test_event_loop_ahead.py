"""The loop over a runner that does not wait for its device: what is launched and awaited when."""

import pytest

from common.event_loop import EventLoop
from common.events import AdminDone, AdminRequest, FromRouter, Shutdown
from common.messages import (
    Abort,
    AbortRequests,
    AdminVerb,
    Failed,
    FailureKind,
    FlushCache,
    LoadAdapter,
    Pause,
    Retracted,
    Tokens,
)
from common.modes import PauseMode
from common.plan import ToRouterMsg
from prefill_node.scheduler import PrefillScheduler
from tests.unit import test_event_loop
from tests.unit.scheduler.harness import generate
from tests.unit.test_event_loop import Recorder


def make() -> tuple[EventLoop, Recorder, PrefillScheduler]:
    """A prompt of two chunks is there."""
    loop, recorder, scheduler = test_event_loop.make()
    recorder.overlaps = True
    return loop, recorder, scheduler


def turn(loop: EventLoop, recorder: Recorder) -> list[str]:
    """What the loop does in one turn."""
    recorder.did.clear()
    assert loop.turn()
    return list(recorder.did)


def test_the_next_step_is_launched_before_the_one_in_flight_is_awaited() -> None:
    loop, recorder, scheduler = make()
    assert turn(loop, recorder) == ["run"]
    assert turn(loop, recorder) == ["run", "result"]
    assert turn(loop, recorder) == ["Write", "result"]
    assert turn(loop, recorder) == ["Write", "send", "wait"]
    (tokens,) = [m.body for m in recorder.sent if isinstance(m, ToRouterMsg)]
    assert isinstance(tokens, Tokens)
    assert len(scheduler.inflight_queue) == 1


@pytest.mark.parametrize(
    "verb",
    [
        *map(Pause, PauseMode), FlushCache(), AbortRequests(), LoadAdapter(name="a", path="/a"),
    ],
)  # fmt: skip
def test_a_control_message_waits_for_what_is_in_flight(verb: AdminVerb) -> None:
    loop, recorder, scheduler = make()
    turn(loop, recorder)
    assert len(scheduler._flight) == 1
    recorder.inbox.append(AdminRequest(7, verb))
    assert turn(loop, recorder)[0] == "result"
    if isinstance(verb, Pause):
        assert "run" not in recorder.did
        assert len(scheduler._flight) == 0
        assert recorder.did[-1] == "wait"


def test_a_retract_pause_hands_back_what_was_in_flight_and_keeps_no_page() -> None:
    loop, recorder, scheduler = make()
    turn(loop, recorder)
    recorder.inbox.append(AdminRequest(7, Pause(PauseMode.RETRACT)))
    turn(loop, recorder)
    retracted, done = recorder.sent[-2:]
    assert retracted == ToRouterMsg("r", Retracted(1))
    assert done == AdminDone(7, True, "paused (retract)")
    assert list(scheduler.aborting_queue), "the chunk computed before the pause is being written"


def test_what_a_router_or_peer_says_does_not_wait() -> None:
    loop, recorder, scheduler = make()
    recorder.inbox.append(FromRouter("r", generate(2)))
    turn(loop, recorder)
    recorder.inbox.append(FromRouter("r", Abort(1)))
    assert turn(loop, recorder) == ["send", "result"], "its peer hears of it before the step ends"
    assert [req.room for req in scheduler.unfinished()] == [2]
    assert scheduler.kv.num_free == 24


def test_asked_to_end_at_once_it_takes_in_what_is_in_flight_first() -> None:
    loop, recorder, scheduler = make()
    turn(loop, recorder)
    recorder.inbox.append(Shutdown(at_once=True))
    recorder.did.clear()
    assert not loop.turn()
    assert recorder.did[0] == "result"
    assert len(scheduler._flight) == 0


def test_asked_to_end_it_finishes_what_it_computes_first() -> None:
    loop, recorder, _ = make()
    turn(loop, recorder)
    recorder.inbox.append(Shutdown())
    assert turn(loop, recorder)[0] == "result"
    assert "run" in recorder.did


def test_a_launch_that_fails_is_told_behind_the_step_before_it() -> None:
    loop, recorder, scheduler = make()
    turn(loop, recorder)
    recorder.error = RuntimeError("out of luck")
    assert turn(loop, recorder) == ["run", "result"]
    recorder.error = None
    turn(loop, recorder)
    (failed,) = [m.body for m in recorder.sent if isinstance(m, ToRouterMsg)]
    assert isinstance(failed, Failed)
    assert failed.kind is FailureKind.ENGINE
    assert "out of luck" in failed.message
    assert scheduler.counters["failed_steps"] == 1
    assert len(scheduler._flight) == 0
