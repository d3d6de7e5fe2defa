"""The router link's decisions, without sockets or clocks."""

import pytest

from common.messages import Abort, Envelope, Ping, Refused, ToNode, Welcome
from common.node_io.router_link import REFUSED_RETRY_S, Received, RouterLink

ABORT = Abort(1)


def link(router: str | None = "r1") -> RouterLink:
    made = RouterLink("n1", heartbeat_s=1.0, timeout_s=10.0)
    if router is not None:
        made.receive(Envelope("r1", "n1", 1, Welcome()), 100.0)
    return made


def envelope(body: ToNode, *, source: str = "r1", to: str = "n1", seq: int = 2) -> Envelope[ToNode]:
    return Envelope(source, to, seq, body)


@pytest.mark.parametrize(
    ("message", "expected", "linked"),
    [
        (envelope(ABORT), Received(body=ABORT), "r1"),
        (envelope(ABORT, to="n0"), Received(dropped="stale_router_messages"), "r1"),
        (envelope(ABORT, to=""), Received(dropped="stale_router_messages"), "r1"),
        (envelope(ABORT, source="r2"), Received(dropped="stale_router_messages"), "r1"),
        (envelope(ABORT, source=""), Received(dropped="stale_router_messages"), "r1"),
        (envelope(ABORT, seq=3), Received(lost="r1", dropped="router_sequence_gaps"), None),
        (envelope(ABORT, seq=1), Received(lost="r1", dropped="router_sequence_gaps"), None),
        (envelope(Ping(0.0), source="r2"), Received(lost="r1"), None),
        (envelope(Welcome(), seq=9), Received(body=Welcome()), "r1"),
        (
            envelope(Welcome(reset=True)),
            Received(body=Welcome(reset=True), lost="r1"),
            "r1",
        ),
        (envelope(Welcome(), source="r2", seq=1), Received(body=Welcome(), lost="r1"), "r2"),
        (envelope(Welcome(), to="n0"), Received(dropped="stale_router_messages"), "r1"),
    ],
)
def test_what_a_linked_node_makes_of_a_message(
    message: Envelope[ToNode], expected: Received, linked: str | None
) -> None:
    it = link()
    assert it.receive(message, 101.0) == expected
    assert it.router == linked


def test_a_refused_node_asks_again_after_a_while() -> None:
    it = link(None)
    it.greeted(1.0)
    received = it.receive(envelope(Refused("the name is taken"), seq=0), 1.1)
    assert received == Received(refused="the name is taken")
    assert not it.greeting_due(1.1 + REFUSED_RETRY_S - 0.01)
    assert it.greeting_due(1.1 + REFUSED_RETRY_S)
    it.receive(envelope(Welcome(), seq=1), 7.0)
    assert it.router == "r1"


def test_a_router_may_refuse_a_node_that_it_had_welcomed_and_no_other_may() -> None:
    it = link()
    other = envelope(Refused("no"), source="r2", seq=0)
    assert it.receive(other, 101.0) == Received(dropped="stale_router_messages")
    assert it.receive(envelope(Refused("no"), seq=0), 101.0) == Received(lost="r1", refused="no")
    assert it.router is None


@pytest.mark.parametrize("body", [ABORT, Ping(0.0)])
def test_a_node_that_greets_takes_nothing_but_a_welcome(body: ToNode) -> None:
    it = link(None)
    assert it.receive(envelope(body), 1.0) == Received(dropped="stale_router_messages")
    assert it.receive(envelope(Welcome(reset=True)), 1.0).lost == "r1"
    assert it.router == "r1"


def test_a_message_that_comes_twice_counts_once() -> None:
    it = link()
    assert it.receive(envelope(ABORT, seq=2), 100.0).body == ABORT
    for _ in range(2):
        assert it.receive(envelope(ABORT, seq=2), 100.0).dropped == "repeated_router_messages"
    assert it.receive(envelope(Abort(2), seq=3), 100.0).body == Abort(2)
    assert it.receive(envelope(ABORT, seq=2), 100.0).lost == "r1", "older ones are no repetition"


def test_numbers_restart_with_each_welcome() -> None:
    it = link()
    assert it.receive(envelope(ABORT, seq=2), 100.0).body == ABORT
    assert it.receive(envelope(Welcome(), seq=1), 100.0).lost is None
    assert it.receive(envelope(ABORT, seq=2), 100.0).body == ABORT
    assert it.receive(envelope(ABORT, seq=3), 100.0).body == ABORT


def test_a_late_ping_of_an_older_incarnation_does_not_lose_the_new_one() -> None:
    it = link()
    it.receive(envelope(Welcome(), source="r2", seq=1), 100.0)
    assert it.receive(envelope(Ping(0.0), source="r1"), 100.0) == Received(
        dropped="stale_router_messages"
    )
    assert it.router == "r2"


def test_an_address_that_fronts_two_routers_may_return_to_the_first() -> None:
    it = link()
    for source, lost in (("r2", "r1"), ("r1", "r2"), ("r2", "r1")):
        received = it.receive(envelope(Welcome(), source=source, seq=1), 100.0)
        assert (received.lost, it.router) == (lost, source)
        assert it.receive(envelope(ABORT, source=source, seq=2), 100.0).body == ABORT


def test_hello_is_number_one_and_repeats_every_heartbeat() -> None:
    it = link(None)
    assert it.greeting_due(5.0)
    it.greeted(5.0)
    assert not it.greeting_due(5.9)
    assert it.greeting_due(6.0)
    it.greeted(6.0)
    it.receive(envelope(Welcome(), seq=1), 6.1)
    assert not it.greeting_due(60.0)
    assert [it.number(), it.number()] == [2, 3]


def test_silence_counts_from_the_last_sign_of_life() -> None:
    it = link()
    assert not it.silent(110.0)
    it.receive(envelope(Ping(0.0), seq=2), 105.0)
    assert not it.silent(115.0)
    assert it.silent(115.1)
    assert it.lose() == "r1"
    assert it.lose() is None, "a loss is reported once"
    assert not it.silent(1000.0)
    assert it.greeting_due(115.1)


def test_strangers_are_no_sign_of_life() -> None:
    it = link()
    it.receive(envelope(ABORT, source="r2"), 109.0)
    it.receive(envelope(Ping(0.0), to="n0"), 109.0)
    assert it.silent(110.1)


def test_a_parked_link_is_quiet_until_its_connection_is_new() -> None:
    it = link()
    it.park("r1")
    assert not it.greeting_due(1000.0)
    assert it.receive(envelope(Welcome(), seq=1), 100.0).dropped == "stale_router_messages"
    it.connected()
    assert it.greeting_due(0.0)
