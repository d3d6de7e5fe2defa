"""What routers hear of a node's adapters, and when."""

from contextlib import AbstractContextManager

from common.events import AdminDone, AdminRequest
from common.messages import (
    AdapterInfo,
    Admin,
    AdminReply,
    Heartbeat,
    Hello,
    LoadAdapter,
    NodeAdapters,
    NodeState,
    NodeStats,
    Retracted,
    ToRouter,
)
from common.plan import ToRouterMsg
from tests.unit.node_io.rig import REGISTRATION, Engine, FakeRouter, decode

A = AdapterInfo(name="a", digest="da", path="/a", rank=8)
B = AdapterInfo(name="b", digest="db", path="/b", rank=16, pinned=True)


def quiet(router: FakeRouter) -> AbstractContextManager[Engine]:
    """A node that says nothing by itself while a test looks."""
    return decode(router.address, heartbeat_s=30.0, router_timeout_s=90.0)


def heard(router: FakeRouter, last: type[ToRouter]) -> list[ToRouter]:
    """Everything from now on up to a message of this kind."""
    before = len(router.got)
    router.await_body(last)
    return [envelope.body for envelope in router.got[before:]]


def joined(engine: Engine, router: FakeRouter) -> None:
    engine.io.announce(REGISTRATION)
    router.welcome()


def test_the_list_is_the_first_word_after_a_welcome_also_when_empty(router: FakeRouter) -> None:
    with quiet(router) as engine:
        joined(engine, router)
        said = [envelope.body for envelope in router.got if not isinstance(envelope.body, Hello)]
        assert said[0] == NodeAdapters([])
        assert isinstance(said[1], Heartbeat)


def test_the_answer_to_a_load_follows_the_list_that_shows_it(router: FakeRouter) -> None:
    with quiet(router) as engine:
        joined(engine, router)
        verb = LoadAdapter(name="a", path="/a")
        router.say(Admin(id=9, verb=verb), to="d1")
        request = engine.get(AdminRequest)
        assert request.verb == verb
        engine.io.publish(NodeStats(), adapters=(A,))
        engine.io.send([AdminDone(request.ticket, True, "loaded", digest="da")])
        said = heard(router, AdminReply)
        assert [s for s in said if not isinstance(s, Heartbeat)] == [
            NodeAdapters([A]),
            AdminReply(id=9, ok=True, message="loaded", digest="da"),
        ]


def test_a_change_is_told_at_once_and_once(router: FakeRouter) -> None:
    with quiet(router) as engine:
        joined(engine, router)
        engine.io.publish(NodeStats(), adapters=(A,))
        assert router.await_body(NodeAdapters).body == NodeAdapters([A])
        engine.io.publish(NodeStats(state=NodeState.PAUSED), adapters=(A,))
        engine.io.publish(NodeStats(), adapters=(A, B))
        engine.io.send([ToRouterMsg("r1", Retracted(1))])
        said = heard(router, Retracted)
        assert [s for s in said if isinstance(s, NodeAdapters)] == [NodeAdapters([A, B])]


def test_each_router_and_each_link_is_told(router: FakeRouter, other_router: FakeRouter) -> None:
    with decode(router.address, other_router.address) as engine:
        engine.io.announce(REGISTRATION)
        engine.io.publish(NodeStats(), adapters=(A,))
        for each in (router, other_router):
            each.welcome()
            assert NodeAdapters([A]) in [envelope.body for envelope in each.got]
        router.restart("r3")
        router.welcome(reset=True)
        said = [envelope.body for envelope in router.got if not isinstance(envelope.body, Hello)]
        assert said[0] == NodeAdapters([A])
