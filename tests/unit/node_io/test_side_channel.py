"""A prefill and a decode node's I/O, talking over the loopback."""

import itertools
import time

import msgspec
import pytest
import zmq

from common.events import FromPeer, PeerClosed
from common.messages import (
    Cancel,
    Destination,
    Drained,
    Envelope,
    NodeState,
    NodeStats,
    PeerBye,
    PeerHello,
    PeerRefused,
    PeerWelcome,
    Ping,
    Pong,
    RoomUnknown,
    Sync,
    ToDecode,
    ToPrefill,
    decode_to_decode,
    decode_to_prefill,
    encode,
)
from common.plan import DialPeer, HangUp, ToPeerMsg
from tests.unit.node_io.rig import (
    FINGERPRINT,
    MEMORY,
    REGISTRATION,
    SILENCE_S,
    Engine,
    decode,
    eventually,
    prefill,
)

WELCOME = PeerWelcome(fingerprint=FINGERPRINT)
HELLO = PeerHello(fingerprint=FINGERPRINT, memories=(MEMORY,), lease_s=10.0)


def is_hello(event: FromPeer) -> bool:
    return isinstance(event.body, PeerHello)


def is_destination(event: FromPeer) -> bool:
    return isinstance(event.body, Destination)


def shake_hands(p: Engine, d: Engine, peer: str = "p1", link: int = 1) -> None:
    d.io.announce(REGISTRATION)
    d.io.send([DialPeer(peer, p.io.side_channel, link)])
    hello = p.get(FromPeer, is_hello)
    greeting = msgspec.structs.replace(HELLO, link=link)
    assert hello == FromPeer("d1", link, greeting)
    p.io.send([ToPeerMsg("d1", link, WELCOME)])
    assert d.get(FromPeer) == FromPeer(peer, link, WELCOME)


def silences(engine: Engine, seconds: float) -> list[PeerClosed]:
    return [event for event in engine.quiet(seconds) if isinstance(event, PeerClosed)]


def test_handshake_then_both_directions() -> None:
    with prefill() as p, decode() as d:
        shake_hands(p, d)
        d.io.send(
            [ToPeerMsg("p1", 1, Cancel(3)), ToPeerMsg("p1", 1, Sync(open=[4], cancelling=[]))]
        )
        assert p.get(FromPeer, lambda e: isinstance(e.body, Cancel)).body == Cancel(3)
        p.get(FromPeer, lambda e: isinstance(e.body, Sync))
        p.io.send([ToPeerMsg("d1", 1, Drained(room=3)), ToPeerMsg("d1", 1, RoomUnknown(4))])
        assert [d.get(FromPeer).body for _ in range(2)] == [Drained(room=3), RoomUnknown(4)]


def test_pings_renew_the_lease_and_keep_both_ends_alive() -> None:
    with prefill() as p, decode() as d:
        began = time.monotonic()
        shake_hands(p, d)
        assert silences(p, 2 * SILENCE_S) == []
        assert silences(d, 0) == []
        pongs = [e.body for e in p.seen if isinstance(e, FromPeer) and isinstance(e.body, Pong)]
        stamps = [pong.heard for pong in pongs]
        assert len(stamps) >= 5
        assert stamps == sorted(stamps)
        assert began < stamps[0] < time.monotonic()
        assert {pong.lease_s for pong in pongs} == {10.0}
        assert not d.seen, "pings of a running peer are no news to the engine"


def test_a_destination_carries_the_newest_ping() -> None:
    with prefill() as p, decode() as d:
        shake_hands(p, d)
        newest = p.get(FromPeer, lambda e: isinstance(e.body, Pong)).body
        assert isinstance(newest, Pong)
        d.io.send([ToPeerMsg("p1", 1, Destination(room=5, pages=[1, 2]))])
        sent = p.get(FromPeer, is_destination).body
        assert isinstance(sent, Destination)
        assert newest.heard <= sent.heard <= time.monotonic()
        assert (sent.lease_s, sent.room, sent.pages) == (10.0, 5, [1, 2])


def test_already_the_first_destination_renews_a_lease() -> None:
    """Else prefill could post nothing until the next heartbeat."""
    with prefill() as p, decode() as d:
        shake_hands(p, d)
        d.io.send([ToPeerMsg("p1", 1, Destination(room=5, pages=[1]))])
        sent = p.get(FromPeer, is_destination).body
        assert isinstance(sent, Destination)
        assert sent.lease_s == 10.0
        assert sent.heard > 0


def test_a_paused_prefill_says_so_and_says_when_it_is_over() -> None:
    with prefill() as p, decode() as d:
        shake_hands(p, d)
        p.io.publish(NodeStats(state=NodeState.PAUSED))
        ping = d.get(FromPeer, lambda e: isinstance(e.body, Ping)).body
        assert isinstance(ping, Ping)
        assert ping.paused
        p.io.publish(NodeStats(state=NodeState.READY))
        d.get(FromPeer, lambda e: isinstance(e.body, Ping) and not e.body.paused)


def test_a_refusal_reaches_decode_before_the_link_closes() -> None:
    with prefill() as p, decode() as d:
        d.io.announce(REGISTRATION)
        d.io.send([DialPeer("p1", p.io.side_channel, 1)])
        p.get(FromPeer, is_hello)
        p.io.send([ToPeerMsg("d1", 1, PeerRefused(reason="page_size")), HangUp("d1", 1)])
        assert d.get(FromPeer).body == PeerRefused(reason="page_size")


def test_prefills_goodbye_reaches_decode_before_its_socket_closes() -> None:
    with prefill() as p, decode() as d:
        shake_hands(p, d)
        p.io.send([ToPeerMsg("d1", 1, PeerBye())])
        p.io.close()
        assert d.get(FromPeer) == FromPeer("p1", 1, PeerBye())


def test_hanging_up_says_bye_and_ends_the_pongs() -> None:
    with prefill() as p, decode() as d:
        shake_hands(p, d)
        d.io.send([HangUp("p1", 1), HangUp("p1", 1), ToPeerMsg("p1", 1, Cancel(1))])
        p.get(FromPeer, lambda e: isinstance(e.body, PeerBye))
        p.seen.clear()
        assert p.quiet(2 * SILENCE_S) == [], "neither a pong nor a silence after goodbye"
        (closed,) = silences(d, 0)
        assert (closed.peer, closed.link, closed.why) == ("p1", 1, "hung up")
        d.seen.clear()
        shake_hands(p, d, link=2)


def test_a_link_that_prefill_hung_up_is_greeted_again() -> None:
    with prefill() as p, decode() as d:
        shake_hands(p, d)
        p.seen.clear()
        p.io.send([HangUp("d1", 1)])
        assert p.get(FromPeer, is_hello).link == 1
        assert silences(d, SILENCE_S) == []


def test_each_end_notices_that_the_other_died() -> None:
    with prefill() as p:
        with decode() as d:
            shake_hands(p, d)
            d.io.close(goodbye=False)
        assert p.get(PeerClosed) == PeerClosed("d1", 1, "the peer is silent")
        with decode() as d:
            shake_hands(p, d, link=2)
            p.io.close(goodbye=False)
            closed = d.get(PeerClosed)
            assert (closed.peer, closed.link, closed.gone) == ("p1", 2, True)
            assert closed.silent_s is not None
            assert closed.silent_s < SILENCE_S, "a refused connection needs no time-out"
            assert silences(d, SILENCE_S) == [], "once"


def test_nobody_at_the_address_is_told_at_once() -> None:
    with decode(peer_timeout_s=60.0) as d:
        d.io.announce(REGISTRATION)
        d.io.send([DialPeer("p1", "tcp://127.0.0.1:9", 1), DialPeer("p2", "nonsense", 2)])
        nonsense = d.get(PeerClosed, lambda e: e.peer == "p2")
        assert (nonsense.link, nonsense.silent_s, nonsense.gone) == (2, None, False)
        refused = d.get(PeerClosed, lambda e: e.peer == "p1")
        assert (refused.link, refused.silent_s, refused.gone) == (1, None, True)
        assert silences(d, 0.1) == []


def test_another_incarnation_at_the_address_means_that_the_one_before_is_gone() -> None:
    with prefill(incarnation="p2") as p, decode(peer_timeout_s=60.0) as d:
        d.io.announce(REGISTRATION)
        d.io.send([DialPeer("p1", p.io.side_channel, 1)])
        closed = d.get(PeerClosed)
        assert (closed.peer, closed.gone) == ("p1", True)
        assert "p2" in closed.why
        assert p.quiet(0) == []
        shake_hands(p, d, peer="p2", link=2)


def test_a_prefill_that_is_replaced_on_its_port_is_known_to_be_gone_without_a_word_to_it() -> None:
    with decode(peer_timeout_s=60.0) as d:
        with prefill() as p:
            shake_hands(p, d)
            port = int(p.io.side_channel.rpartition(":")[2])
            p.io.close(goodbye=False)
        with prefill(incarnation="p2", side_channel_port=port) as p:
            closed = d.get(PeerClosed)
            assert (closed.peer, closed.link, closed.gone) == ("p1", 1, True)
            shake_hands(p, d, peer="p2", link=2)


class Raw:
    """A plain socket that plays one end badly."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> None:
        self.socket = context.socket(kind)
        self.socket.linger = 0
        self.numbers = itertools.count(1)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def to_prefill(self, body: ToPrefill, *, source: str = "d9", to: str = "p1") -> None:
        self.socket.send(encode(Envelope(source, to, next(self.numbers), body)))

    def to_decode(self, node_id: bytes, body: ToDecode, *, source: str = "p1") -> None:
        envelope = Envelope(source, "d1", next(self.numbers), body)
        self.socket.send_multipart([node_id, encode(envelope)])


def test_a_lost_first_greeting_is_repeated(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    with Raw(context, zmq.ROUTER) as raw, decode() as d:
        raw.socket.bind("tcp://127.0.0.1:*")
        address = raw.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        d.io.announce(REGISTRATION)
        d.io.send([DialPeer("p1", address, 1)])
        for seq in (1, 2, 3):
            assert raw.socket.poll(2000)
            node_id, payload = raw.socket.recv_multipart()
            assert decode_to_prefill(payload).seq == seq
        raw.to_decode(node_id, WELCOME, source="p0")
        raw.to_decode(node_id, Ping(77.0))
        raw.to_decode(node_id, WELCOME)
        assert d.get(FromPeer) == FromPeer("p1", 1, WELCOME)
        d.io.send([ToPeerMsg("p1", 1, Destination(room=1, pages=[0]))])
        said: list[ToPrefill] = []
        while not any(isinstance(body, Destination) for body in said):
            assert raw.socket.poll(2000)
            said.append(decode_to_prefill(raw.socket.recv_multipart()[1]).body)
        assert Pong(heard=77.0, lease_s=10.0) in said
        assert said[-1] == Destination(room=1, pages=[0], heard=77.0, lease_s=10.0)


def refusal(raw: Raw) -> str:
    """Who refused the last message, and why."""
    assert raw.socket.poll(2000)
    envelope = decode_to_decode(raw.socket.recv())
    assert isinstance(envelope.body, PeerRefused)
    assert envelope.seq == 0, "outside any link's numbers"
    return f"{envelope.source}: {envelope.body.reason}"


def test_an_older_links_late_greeting_does_not_take_the_newer_ones_place(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    with prefill() as p, Raw(context, zmq.DEALER) as new, Raw(context, zmq.DEALER) as old:
        for raw in (new, old):
            raw.socket.connect(p.io.side_channel)
        new.to_prefill(msgspec.structs.replace(HELLO, link=2))
        assert p.get(FromPeer, is_hello).link == 2
        old.to_prefill(HELLO)
        assert refusal(old) == "p1: not linked: shake hands again"
        old.to_prefill(PeerBye())
        p.io.send([HangUp("d9", 1), ToPeerMsg("d9", 1, Drained(room=1))])
        new.to_prefill(Cancel(3))
        assert p.get(FromPeer) == FromPeer("d9", 2, Cancel(3))
        assert p.quiet(0) == []


def test_once_the_end_of_a_link_is_told_no_ping_of_it_is_echoed(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    """The quarantine's clock starts there: an echo after it would renew a lease unseen."""
    with Raw(context, zmq.ROUTER) as raw, decode() as d:
        raw.socket.bind("tcp://127.0.0.1:*")
        address = raw.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        d.io.announce(REGISTRATION)
        d.io.send([DialPeer("p1", address, 1)])
        node_id, _ = raw.socket.recv_multipart()
        raw.to_decode(node_id, Ping(1.0))
        d.io.send([HangUp("p1", 1)])
        assert d.get(PeerClosed).link == 1
        raw.to_decode(node_id, Ping(2.0))
        d.io.send([DialPeer("p1", address, 2)])
        said: list[ToPrefill] = []
        while not any(isinstance(body, PeerHello) and body.link == 2 for body in said):
            assert raw.socket.poll(2000)
            said.append(decode_to_prefill(raw.socket.recv_multipart()[1]).body)
        assert Pong(heard=2.0, lease_s=10.0) not in said


def test_garbage_and_strangers_on_the_side_channel(
    context: "zmq.Context[zmq.Socket[bytes]]", caplog: pytest.LogCaptureFixture
) -> None:
    with prefill() as p, decode() as d, Raw(context, zmq.DEALER) as raw:
        raw.socket.connect(p.io.side_channel)
        for junk in ([b"\xc1"], [], [b"a", b"b", b"c"], [b"\x94" * 9000]):
            raw.socket.send_multipart(junk or [b""])
        raw.to_prefill(Cancel(1))  # not linked
        assert refusal(raw) == "p1: not linked: shake hands again"
        raw.to_prefill(HELLO, to="p0")  # for an older incarnation
        assert refusal(raw) == "p1: another incarnation listens here"
        raw.to_prefill(HELLO)
        assert p.get(FromPeer).body == HELLO
        raw.to_prefill(Pong(heard=time.monotonic() + 60, lease_s=10.0))  # from the future
        raw.to_prefill(Cancel(2), source="d8")  # somebody else's name
        next(raw.numbers)
        raw.to_prefill(Cancel(3))  # after a gap, which costs nothing
        assert p.get(FromPeer).body == Cancel(3)
        assert p.seen == []
        assert raw.socket.poll(2000)
        ping = decode_to_decode(raw.socket.recv())
        assert isinstance(ping.body, Ping)
        shake_hands(p, d)
        garbage = [r for r in caplog.records if "garbage_peer_frames" in r.message]
        assert len(garbage) == 1


def test_messages_to_strangers_are_dropped() -> None:
    with prefill() as p, decode() as d:
        p.io.send(
            [ToPeerMsg("d1", 1, WELCOME), DialPeer("d1", "tcp://127.0.0.1:9", 1), HangUp("x", 1)]
        )
        d.io.send([ToPeerMsg("p1", 1, Cancel(1))])
        shake_hands(p, d)


def test_a_handshake_survives_a_prefill_engine_that_is_slow_to_answer() -> None:
    with prefill() as p, decode() as d:
        d.io.announce(REGISTRATION)
        d.io.send([DialPeer("p1", p.io.side_channel, 1)])
        p.get(FromPeer, is_hello)
        assert silences(d, 2 * SILENCE_S) == [], "its I/O thread pings: busy is not dead"
        repeated = [e for e in p.quiet(0) if isinstance(e, FromPeer) and is_hello(e)]
        assert len(repeated) > 3
        p.io.send([ToPeerMsg("d1", 1, WELCOME)])
        eventually(lambda: any(isinstance(e, FromPeer) for e in d.quiet(0.02)))
