"""The router link over a real socket."""

import itertools
import threading
import time

import pytest
import zmq

from common.events import AdminDone, AdminRequest, FromRouter, RouterLost, Shutdown
from common.messages import (
    Abort,
    Admin,
    AdminReply,
    Continue,
    Goodbye,
    Heartbeat,
    Hello,
    NodeStats,
    Ping,
    Retracted,
    Welcome,
)
from common.node_io.addresses import Endpoint
from common.plan import ToRouterMsg
from tests.unit.node_io.rig import (
    HEARTBEAT_S,
    REGISTRATION,
    SILENCE_S,
    Engine,
    FakeRouter,
    decode,
)


def joined(engine: Engine, router: FakeRouter) -> Hello:
    engine.io.announce(REGISTRATION)
    return router.welcome()


def keep_alive(router: FakeRouter, seconds: float, to: str = "d1") -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        router.say(Ping(0.0), to=to)
        router.receive(0.05)


def test_nothing_is_said_before_the_node_announces_itself(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        assert router.receive(0.3) is None
        hello = joined(engine, router)
        assert (hello.name, hello.url, hello.num_pages) == ("d1", engine.io.url, 8)


def test_hello_is_repeated_until_welcome_and_heartbeats_follow(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        engine.io.announce(REGISTRATION)
        hellos = [router.await_body(Hello) for _ in range(3)]
        assert {(h.seq, h.to, h.source) for h in hellos} == {(1, "", "d1")}
        router.say(Welcome(), to="d1")
        engine.io.publish(NodeStats(free_pages=5))
        beats = [router.await_body(Heartbeat) for _ in range(3)]
        assert [b.seq for b in beats] == [3, 4, 5]  # 2 were the adapters
        assert {b.to for b in beats} == {"r1"}
        assert isinstance(beats[-1].body, Heartbeat)
        assert beats[-1].body.stats.free_pages == 5
        assert not any(isinstance(e.body, Hello) for e in router.got[-2:])


def test_work_arrives_and_answers_leave_in_order(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        joined(engine, router)
        router.say(Abort(7), to="d1")
        assert engine.get(FromRouter) == FromRouter("r1", Abort(7))
        engine.io.send([ToRouterMsg("r1", Retracted(room)) for room in range(200)])
        rooms = [router.await_body(Retracted).body for _ in range(200)]
        assert rooms == [Retracted(room) for room in range(200)]
        numbers = [e.seq for e in router.got if not isinstance(e.body, Hello)]
        assert numbers == list(range(2, 2 + len(numbers)))


def test_reset_ends_the_rooms_before_new_work(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        engine.io.announce(REGISTRATION)
        router.welcome(reset=True)
        router.say(Abort(1), to="d1")
        engine.get(FromRouter)
        assert RouterLost("r1") in engine.seen


def test_a_silent_router_is_lost_once_and_greeted_again(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        joined(engine, router)
        keep_alive(router, 1.5 * SILENCE_S)
        assert not [e for e in engine.quiet(0) if isinstance(e, RouterLost)]
        assert engine.get(RouterLost) == RouterLost("r1")
        router.welcome()
        assert not [e for e in engine.quiet(0.1) if isinstance(e, RouterLost)]


def test_a_gap_in_the_routers_numbers_loses_it(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        joined(engine, router)
        router.say(Abort(2), to="d1", skip=1)
        assert engine.get(RouterLost) == RouterLost("r1")
        router.welcome()
        router.say(Abort(3), to="d1")
        assert engine.get(FromRouter).body == Abort(3)


def test_a_restarted_router_is_joined_at_once(router: FakeRouter) -> None:
    with decode(router.address, router_timeout_s=60.0) as engine:
        joined(engine, router)
        router.restart("r2")
        router.welcome()
        assert engine.get(RouterLost) == RouterLost("r1")
        router.say(Abort(4), to="d1")
        assert engine.get(FromRouter) == FromRouter("r2", Abort(4))
        assert not [e for e in engine.seen if isinstance(e, RouterLost)]


def test_a_ping_under_a_new_incarnation_loses_the_old(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        joined(engine, router)
        router.say(Ping(0.0), to="d1", source="r2")
        assert engine.get(RouterLost) == RouterLost("r1")
        router.await_body(Hello)


def test_stale_messages_and_garbage_change_nothing(
    router: FakeRouter, caplog: pytest.LogCaptureFixture
) -> None:
    with decode(router.address) as engine:
        joined(engine, router)
        for junk in ([b"\xc1junk"], [b""], [b"a", b"b"], [b"\x94" * 5000]):
            router.socket.send_multipart([router.node_id, *junk])
        router.say(Abort(5), to="somebody else")
        router.numbers = itertools.count(2)
        router.say(Abort(6), to="d1")
        assert engine.get(FromRouter).body == Abort(6)
        assert not engine.seen
        assert sum("garbage_router_frames" in r.message for r in caplog.records) == 1


def test_messages_to_unknown_routers_are_dropped(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        joined(engine, router)
        engine.io.send([ToRouterMsg("r0", Retracted(1)), ToRouterMsg("r1", Retracted(2))])
        assert router.await_body(Retracted).body == Retracted(2)


def test_admin_verbs_come_back_to_the_router_that_asked(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        joined(engine, router)
        router.say(Admin(id=11, verb=Continue()), to="d1")
        request = engine.get(AdminRequest)
        assert request.verb == Continue()
        engine.io.send([AdminDone(request.ticket, False, "no")])
        reply = router.await_body(AdminReply).body
        assert reply == AdminReply(id=11, ok=False, message="no")


def test_one_router_behind_two_addresses_is_linked_once(router: FakeRouter) -> None:
    router.socket.bind("tcp://127.0.0.1:*")
    other = router.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    with decode(router.address, other, router_timeout_s=60.0) as engine:
        engine.io.announce(REGISTRATION)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            envelope = router.receive(0.05)
            if envelope is not None and isinstance(envelope.body, Hello):
                router.numbers = itertools.count(1)
                router.say(Welcome(), to="d1")
        assert not any(isinstance(e.body, Hello) for e in router.got[-5:]), "they fight"
        router.say(Abort(8), to="d1")
        assert engine.get(FromRouter).body == Abort(8)


def test_a_router_that_comes_late_is_not_met_by_a_pile_of_hellos(router: FakeRouter) -> None:
    router.socket.close(0)
    with decode(router.address) as engine:
        engine.io.announce(REGISTRATION)
        time.sleep(8 * HEARTBEAT_S)
        router.restart("r1")
        router.await_body(Hello)
        router.say(Welcome(), to="d1")
        router.await_body(Heartbeat)
        assert sum(isinstance(e.body, Hello) for e in router.got) <= 2


def test_routers_behind_a_name_are_followed(
    router: FakeRouter, other_router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {Endpoint.parse(router.address)}

    async def look_up(endpoint: Endpoint) -> frozenset[Endpoint]:
        assert endpoint == Endpoint("routers.example", 1)
        return frozenset(named)

    monkeypatch.setattr("common.node_io.router_links.expand", look_up)
    with decode("tcp://routers.example:1", resolve_s=0.05) as engine:
        joined(engine, router)
        named.add(Endpoint.parse(other_router.address))
        other_router.welcome()
        named.remove(Endpoint.parse(router.address))
        time.sleep(0.15)
        router.say(Abort(1), to="d1")
        assert engine.get(FromRouter).router == "r1", "still linked: a name may flicker"
        engine.get(RouterLost, lambda lost: lost.router == "r1")
        while router.receive(4 * HEARTBEAT_S):
            pass
        assert router.receive(SILENCE_S) is None, "forgotten: nobody greets there any more"
        other_router.await_body(Hello)


def test_goodbye_is_the_last_word(router: FakeRouter) -> None:
    with decode(router.address) as engine:
        joined(engine, router)
        engine.io.send([ToRouterMsg("r1", Retracted(9))])
    router.await_body(Retracted)
    router.await_body(Goodbye)


def test_wake_interrupts_wait_from_any_thread(router: FakeRouter) -> None:
    with decode() as engine:
        threading.Timer(0.05, engine.io.wake).start()
        began = time.monotonic()
        engine.io.wait(5.0)
        assert time.monotonic() - began < 2.0
        engine.io.ask_to_end()
        engine.io.wait(5.0)
        assert engine.io.drain() == [Shutdown()]
