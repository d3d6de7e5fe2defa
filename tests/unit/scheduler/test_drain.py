"""How a node leaves: what it finishes, what it hands over, and when it may end."""

import random

import pytest

from common.events import PeerClosed, RouterLost
from common.messages import (
    Abort,
    Cancel,
    Drained,
    Failed,
    FailureKind,
    NodeState,
    PeerBye,
    PeerNode,
    Peers,
    PeerWelcome,
    Retracted,
    RoomFailed,
    StopReason,
    Tokens,
)
from common.modes import PauseMode
from common.plan import DialPeer, HangUp, StepPlan, WriteDone
from tests.unit.scheduler.client import ModelRouter
from tests.unit.scheduler.harness import (
    Driven,
    decode,
    destination,
    generate,
    landed,
    prefill,
    running,
)
from tests.unit.scheduler.model import VOCAB
from tests.unit.scheduler.node_settings import FINGERPRINT
from tests.unit.scheduler.real_router import RealRouter
from tests.unit.scheduler.world import World


def may_end(node: Driven) -> bool:
    scheduler = node.scheduler
    return scheduler.leave.may_end(node.now, is_empty=scheduler.is_empty)


def begin(node: Driven) -> StepPlan:
    node.scheduler.leave.begin(node.now)
    return node.step()


def later(node: Driven, seconds: float) -> StepPlan:
    node.now += seconds
    return node.step()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_idle_node_may_end_after_one_step(role: str) -> None:
    node = prefill() if role == "prefill" else decode()
    assert not may_end(node)
    begin(node)
    assert may_end(node)
    assert node.scheduler.stats().state is NodeState.DRAINING


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nothing_new_is_taken(role: str) -> None:
    node = prefill() if role == "prefill" else decode()
    node.scheduler.leave.begin(node.now)
    node.router(generate(1))
    node.step()
    assert [failed.kind for failed in node.said(Failed)] == [FailureKind.DRAINING]


def test_prefill_hands_over_what_waits_and_finishes_what_it_computes() -> None:
    node = prefill()
    node.router(generate(1, prompt=20))
    node.peer(destination(1, pages=5), "d")
    node.step()
    node.router(generate(2))
    begin(node)
    assert node.said(Retracted) == [Retracted(2)]
    while not node.said(Tokens):
        node.step()
    node.step()
    assert not may_end(node)  # its writes are posted
    for chunk in range(4):
        node.fact(WriteDone(1, chunk, 1, 0.1))
        node.step()
    assert may_end(node)
    assert node.said(PeerBye)
    assert node.said(Retracted) == [Retracted(2)]


def test_after_the_bound_it_hands_over_what_it_computes_and_waits_for_its_writes() -> None:
    node = prefill()
    node.router(generate(1, prompt=20))
    node.peer(destination(1, pages=5), "d")
    node.step()
    begin(node)
    later(node, 3.0)
    assert node.said(Retracted) == [Retracted(1)]
    assert not may_end(node)
    assert not node.said(PeerBye)
    for chunk in range(2):
        node.fact(WriteDone(1, chunk, 1, 0.1))
    node.step()
    assert node.said(RoomFailed)
    assert node.said(PeerBye)
    assert may_end(node)


def test_past_every_bound_it_ends_but_does_not_say_that_its_writes_have() -> None:
    node = prefill()
    node.router(generate(1, prompt=20))
    node.peer(destination(1, pages=5), "d")
    node.step()
    begin(node)
    later(node, 30.0)
    assert may_end(node)
    assert not node.said(PeerBye)


def test_decode_finishes_what_holds_kv_also_what_is_still_arriving() -> None:
    node = decode(num_pages=5, prefix_cache=False)
    running(node, 1, max_tokens=5)
    node.router(generate(2, prompt=4, max_tokens=5))  # in transfer
    node.router(generate(3, prompt=12, max_tokens=5))  # no page is left
    node.step()
    begin(node)
    assert node.said(Retracted) == [Retracted(3)]
    node.fact(landed(2))
    assert not may_end(node)
    for _ in range(6):
        node.step()
    assert may_end(node)
    finished = [o for batch in node.said(Tokens) for o in batch.outputs if o.finish is not None]
    assert {(o.room, o.finish) for o in finished} == {
        (1, StopReason.LENGTH),
        (2, StopReason.LENGTH),
    }


def test_decode_waits_until_prefill_has_drained_what_was_cancelled() -> None:
    node = decode()
    node.router(generate(1))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.step()
    node.router(Abort(1))
    begin(node)
    assert node.said(Cancel)
    assert not may_end(node)
    node.peer(Drained(room=1), "p")
    node.step()
    assert may_end(node)


def test_decode_waits_for_its_quarantine_but_not_beyond_the_bound() -> None:
    node = decode(lease_s=100.0)
    node.router(generate(1))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.step()
    node.scheduler.handle(PeerClosed("p", 1, "silent"), node.now)
    begin(node)
    later(node, 5.0)
    assert not may_end(node)
    later(node, 2.0)
    assert may_end(node)


@pytest.mark.parametrize("paused_first", [True, False])
def test_a_paused_node_finishes_nothing_so_it_hands_everything_over(paused_first: bool) -> None:
    node = decode()
    running(node, 1, 2)
    if paused_first:
        node.scheduler.pause_generation(PauseMode.IN_PLACE)
    begin(node)
    assert may_end(node) is paused_first
    node.scheduler.pause_generation(PauseMode.IN_PLACE)
    node.step()
    assert set(map(str, node.said(Retracted))) == {str(Retracted(1)), str(Retracted(2))}
    assert may_end(node)


def test_forced_it_hands_over_and_may_end_at_once() -> None:
    node = decode()
    running(node, 1)
    begin(node)
    node.scheduler.leave.force(node.now)
    node.step()
    assert node.said(Retracted) == [Retracted(1)]
    assert may_end(node)


def test_asking_again_does_not_prolong_the_leave() -> None:
    node = decode()
    running(node, 1)
    begin(node)
    later(node, 2.0)
    begin(node)
    later(node, 1.0)
    assert node.said(Retracted) == [Retracted(1)]


# ---------------------------------------------------------------- the other side of it


def test_a_prefill_that_leaves_costs_decode_no_quarantine() -> None:
    """Its word is that every write has ended; only a notification may still be on its way."""
    node = decode()
    for room in (1, 2, 3):
        node.router(generate(room))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.step()
    node.router(Abort(3))
    node.step()
    node.peer(PeerBye(), "p")
    node.fact(landed(1))
    node.step()
    assert node.scheduler.stats().quarantined_pages == 0
    assert [req.room for req in node.scheduler.running_batch] == [1]
    assert not node.said(Failed)
    later(node, 1.0)
    assert [(f.room, f.kind) for f in node.said(Failed)] == [(2, FailureKind.PEER_LOST)]
    assert node.scheduler.kv.num_free == 24 - 2


def test_announced_prefill_nodes_are_dialled_before_a_request_names_them() -> None:
    node = decode()
    node.router(Peers([PeerNode("p", "tcp://p"), PeerNode("q", "tcp://q")]))
    assert {(m.peer, m.address) for m in node.step().messages if isinstance(m, DialPeer)} == {
        ("p", "tcp://p"),
        ("q", "tcp://q"),
    }
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    assert node.scheduler.stats().linked_peers == ["p"]
    node.router(Peers([PeerNode("p", "tcp://p")]))
    assert [m for m in node.step().messages if isinstance(m, HangUp)] == [HangUp("q", 2)]


def test_a_lost_link_to_an_announced_node_is_dialled_again() -> None:
    node = decode()
    node.router(Peers([PeerNode("p", "tcp://p")]))
    node.step()
    node.scheduler.handle(PeerClosed("p", 1, "silent"), node.now)
    assert not [m for m in node.step().messages if isinstance(m, DialPeer)]
    plan = later(node, 1.0)
    assert [m for m in plan.messages if isinstance(m, DialPeer)] == [DialPeer("p", "tcp://p", 2)]


def test_a_lost_routers_nodes_stay_linked_but_are_not_dialled_again() -> None:
    node = decode()
    node.router(Peers([PeerNode("p", "tcp://p"), PeerNode("q", "tcp://q")]))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.scheduler.handle(RouterLost("r"), node.now)
    plan = node.step()
    assert not [m for m in plan.messages if isinstance(m, HangUp)]
    assert node.scheduler.stats().linked_peers == ["p"]
    node.scheduler.handle(PeerClosed("q", 2, "silent"), node.now)
    for _ in range(5):
        assert not [m for m in later(node, 1.0).messages if isinstance(m, DialPeer)]
    node.router(Peers([PeerNode("p", "tcp://p"), PeerNode("q", "tcp://q")]), "r2")
    assert [m.peer for m in node.step().messages if isinstance(m, DialPeer)] == ["q"]


def test_a_link_that_a_room_needs_outlives_the_announcement() -> None:
    node = decode()
    node.router(Peers([PeerNode("p", "tcp://p")]))
    node.step()
    node.peer(PeerWelcome(fingerprint=FINGERPRINT), "p")
    node.router(generate(1))
    node.step()
    node.router(Peers([]))
    assert not [m for m in node.step().messages if isinstance(m, HangUp)]
    node.router(Abort(1))
    node.peer(Drained(room=1), "p")
    assert [m for m in node.step().messages if isinstance(m, HangUp)] == [HangUp("p", 1)]


# ---------------------------------------------------------------- bounded queues


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_more_wait_without_kv_than_allowed(role: str) -> None:
    limit = {"max_queued_requests": 2}
    node = prefill(**limit) if role == "prefill" else decode(**limit)
    for room in (1, 2, 3):
        node.router(generate(room))
    node.step()
    assert [(f.room, f.kind) for f in node.said(Failed)] == [(3, FailureKind.REFUSED)]


# ---------------------------------------------------------------- a whole cluster


@pytest.mark.parametrize("router", [ModelRouter, RealRouter])
@pytest.mark.parametrize("role", ["p", "d"])
def test_rolling_through_a_role_under_load_fails_no_request(
    role: str, router: type[ModelRouter] | type[RealRouter]
) -> None:
    world = World(7, prefills=2, decodes=2, pages=60, router=router, reorder=True)
    chance = random.Random(7)
    for _ in range(20):
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 40))]
        world.router.submit(prompt, 30)
    for _ in range(3):
        for _ in range(5):
            world.tick()
        name = next(n for n in world.nodes if n.startswith(role))
        world.nodes[name].scheduler.leave.begin(world.now)
        _ = world.add_prefill() if role == "p" else world.add_decode()
        while name in world.nodes:
            world.tick()
    world.settle()
    world.router.check()
    assert len(world.left) == 3
