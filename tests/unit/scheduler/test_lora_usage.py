"""Who uses an adapter is read off the queues: whatever ends a request, in whatever state, gives the
usage back in that step, and an unload that waits for it is answered."""

from collections.abc import Callable

import pytest

from common.events import PeerClosed, RouterLost
from common.lifecycle import State
from common.messages import Abort, Cancel, Drained, PeerGone, PeerWelcome, RoomFinished
from common.modes import PauseMode
from common.plan import Write, WriteDone
from decode_node.scheduler import DecodeScheduler
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

A = adapter("a")


def prefill_in(state: State) -> Driven:
    """A prefill node with one request of adapter a in `state`."""
    node = prefill(num_pages=60, max_loras_per_batch=1)
    node.serve("a")
    node.router(generate(1, prompt=12, adapter=A))
    if state is State.BOOTSTRAP:
        return node
    node.peer(destination(1, pages=3, name="a"), "d")
    node.step()
    if state is State.WAITING:
        return node
    node.loader()
    node.step()
    if state is State.INFLIGHT:
        node.step()
    if state is State.ABORTING:
        node.step()
        node.peer(Cancel(1), "d")
    return node


def decode_in(state: State) -> Driven:
    node = decode(num_pages=60, max_loras_per_batch=1)
    node.serve("a")
    node.router(generate(1, adapter=A))
    node.step()
    if state is State.PREALLOC:
        return node
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.step()
    if state in (State.WAITING, State.RUNNING):
        node.fact(landed(1))
        if state is State.RUNNING:
            node.loader()
        node.step()
    if state is State.ABORTING:
        node.router(Abort(1))
    return node


def abort(node: Driven) -> None:
    node.router(Abort(1))


def abort_by_id(node: Driven) -> None:
    node.scheduler.abort_requests("rid-1")


def lose_the_router(node: Driven) -> None:
    node.scheduler.handle(RouterLost("r"), node.now)


def pause(mode: PauseMode) -> Callable[[Driven], None]:
    def ended(node: Driven) -> None:
        node.scheduler.pause_generation(mode)
        if mode is PauseMode.RETRACT:  # what holds no KV stays
            abort(node)

    ended.__name__ = f"pause_{mode}"
    return ended


def leave(node: Driven) -> None:
    node.scheduler.pause_generation(PauseMode.IN_PLACE)  # a paused node hands everything over
    node.scheduler.leave.begin(node.now)
    node.step()


def lose_the_peer(node: Driven) -> None:
    peer = "p" if isinstance(node.scheduler, DecodeScheduler) else "d"
    node.router(PeerGone(peer))
    if isinstance(node.scheduler, DecodeScheduler):
        link = node.scheduler.links._links[peer].number
        node.scheduler.handle(PeerClosed(peer, link, "gone", gone=True), node.now)
        for req in node.scheduler.unfinished():
            abort_by_id(node)  # once everything has landed, prefill's death is no matter
            assert req.queue.state is State.ENDED
    node.router(Abort(1))  # not bound for anybody yet


ENDS: list[Callable[[Driven], None]] = [abort, abort_by_id, lose_the_router, lose_the_peer, leave]
ENDS += [pause(PauseMode.ABORT), pause(PauseMode.RETRACT)]
PREFILL_STATES = [
    State.BOOTSTRAP, State.WAITING, State.PREFILLING, State.INFLIGHT, State.ABORTING,
]  # fmt: skip
DECODE_STATES = [State.PREALLOC, State.TRANSFER, State.WAITING, State.RUNNING, State.ABORTING]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize(
    ("make", "state"),
    [(prefill_in, s) for s in PREFILL_STATES] + [(decode_in, s) for s in DECODE_STATES],
    ids=lambda value: getattr(value, "__name__", "") or value.name,
)
def test_an_end_in_any_state_gives_the_usage_back_at_once(
    make: Callable[[State], Driven], state: State, end: Callable[[Driven], None]
) -> None:
    node = make(state)
    used = state is not State.ABORTING
    assert [req.queue.state for req in node.scheduler._reqs.values()] == [state]
    assert node.scheduler.stats().running_loras == ({"a": 1} if used else {})
    if used:
        node.unload("a", ticket=1)
        node.step()
        assert not node.answers, "somebody uses it"
    end(node)
    assert node.scheduler.stats().running_loras == {}
    if not used:
        node.unload("a", ticket=1)
    node.loader()  # a copy may be under way
    node.step()
    assert [done.ticket for done in node.answers] == [1]
    if not node.answers[0].ok:
        assert end is leave, "only a node that ends has no time for a copy to end"
        return
    assert node.scheduler.stats().lora_slots_used == 0
    assert node.scheduler.stats().loras_in_memory == 0


def test_a_failed_step_gives_the_usage_of_its_requests_back() -> None:
    for node in (prefill_in(State.WAITING), decode_in(State.WAITING)):
        node.loader()
        plan = node.scheduler.schedule(node.now)
        assert plan.batch is not None
        node.scheduler.process_batch_failure("planted", node.now)
        assert node.scheduler.stats().running_loras == {}
        node.unload("a", ticket=1)
        node.step()
        assert node.answers[-1].ok


def test_a_request_that_finishes_leaves_the_running_ones_in_that_step() -> None:
    node = decode()
    node.serve("a")
    node.router(generate(1, max_tokens=2, adapter=A))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.step()
    node.loader()
    node.fact(landed(1))
    node.unload("a", ticket=1)
    node.step()  # computes the last token
    assert node.scheduler.stats().running_loras == {}
    node.step()
    assert node.answers[-1].ok


def test_a_first_token_that_ends_a_request_ends_its_usage_on_both_nodes() -> None:
    node = prefill_in(State.WAITING)
    node.loader()
    node.router(Abort(1))
    node.router(generate(2, max_tokens=1, adapter=A))
    node.peer(destination(2, name="a"), "d")
    for _ in range(2):
        node.step()
    for write in node.sent(Write):
        node.fact(WriteDone(write.room, write.chunk, 1, 0.1))
    assert node.scheduler.stats().running_loras == {}
    other = decode_in(State.TRANSFER)
    other.peer(RoomFinished(1), "p")
    assert other.scheduler.stats().running_loras == {}


def test_an_aborted_transfer_that_prefill_still_drains_uses_nothing() -> None:
    node = decode_in(State.ABORTING)
    node.unload("a", ticket=1)
    node.loader()
    node.step()
    assert node.answers[-1].ok, "its pages wait for prefill's word, its adapter does not"
    node.peer(Drained(room=1), "p")
    node.step()
    assert node.scheduler.kv.num_free == 60
