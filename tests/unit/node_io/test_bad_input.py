"""Bytes from strangers on a node's sockets: a line, a count, and the friends are served on."""

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import zmq

from common.credentials import ClusterKeys, Secret
from common.events import FromPeer
from common.gatekeeper import dial_with
from common.messages import Cancel, Envelope, PeerWelcome, Ping, ToDecode, ToPrefill, encode
from common.plan import DialPeer, ToPeerMsg
from tests.unit.node_io.rig import FINGERPRINT, REGISTRATION, Engine, decode, eventually, prefill
from tests.unit.node_io.test_http import ask
from tests.unit.node_io.test_side_channel import shake_hands

KEYS = ClusterKeys.derive(Secret("a cluster secret for tests"))
GENUINE = encode(Envelope[ToPrefill]("d9", "p1", 1, Cancel(1)))
MALFORMED = [
    b"", b"\xc1", b"\x00" * 100, GENUINE[:-3], GENUINE[:1], GENUINE + b"\x00",
    GENUINE.replace(b"Cancel", b"Cancer"), b"\x81\xa4body" + b"\x91" * 9000, os.urandom(3000),
]  # fmt: skip


def counters(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = ask(engine.io.url + "/server_info").json["counters"]
    return found


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if line.startswith(word + " ")]


@contextmanager
def dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ClusterKeys | None
) -> Iterator["zmq.Socket[bytes]"]:
    made = context.socket(zmq.DEALER)
    made.linger = 0
    dial_with(made, keys)
    made.connect(address)
    try:
        yield made
    finally:
        made.close()


def still_serves(p: Engine, d: Engine, room: int) -> None:
    d.io.send([ToPeerMsg("p1", 1, Cancel(room))])
    p.get(FromPeer, lambda event: event.body == Cancel(room))


@pytest.mark.parametrize("keys", [None, KEYS], ids=["open", "curve"])
def test_other_protocols_on_the_side_channel(
    keys: ClusterKeys | None, caplog: pytest.LogCaptureFixture
) -> None:
    with prefill(keys=keys) as p, decode(keys=keys) as d:
        shake_hands(p, d)
        host, _, port = p.io.side_channel.removeprefix("tcp://").partition(":")
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64 + os.urandom(200), b"\x16\x03\x01"):
            with socket.create_connection((host, int(port)), timeout=5) as raw:
                raw.sendall(junk)
        kinds = ("refused_connections", "broken_handshakes", "garbage_peer_frames")
        eventually(lambda: sum(counters(p).get(kind, 0) for kind in kinds))
        still_serves(p, d, 1)
        assert len(lines(caplog, "refused_connections")) <= 1
        assert len(lines(caplog, "garbage_peer_frames")) <= 1


@pytest.mark.parametrize("keys", [None, KEYS], ids=["open", "curve"])
def test_malformed_messages_on_the_side_channel_cost_a_line_and_no_memory(
    context: "zmq.Context[zmq.Socket[bytes]]",
    keys: ClusterKeys | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with prefill(keys=keys) as p, decode(keys=keys) as d:
        shake_hands(p, d)
        with dealer(context, p.io.side_channel, keys) as bad:

            def flood(rounds: int, expected: int) -> int:
                for _ in range(rounds):
                    for payload in MALFORMED:
                        bad.send(payload)
                eventually(lambda: counters(p).get("garbage_peer_frames", 0) == expected)
                return int(psutil.Process().memory_info().rss)

            before = flood(100, 100 * len(MALFORMED))
            after = flood(300, 400 * len(MALFORMED))
            assert after - before < 8 << 20
            for _ in range(50):
                bad.send(GENUINE)  # well-formed, from somebody who has not shaken hands
            eventually(lambda: counters(p).get("stale_peer_messages", 0) == 50)
        still_serves(p, d, 2)
    assert len(lines(caplog, "garbage_peer_frames")) == 1
    assert len(lines(caplog, "stale_peer_messages")) == 1
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("keys", [None, KEYS], ids=["open", "curve"])
def test_an_oversized_message_ends_its_own_connection_only(
    context: "zmq.Context[zmq.Socket[bytes]]",
    keys: ClusterKeys | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.node_io.sockets.MAX_MESSAGE_BYTES", 1 << 16)
    with prefill(keys=keys) as p, decode(keys=keys) as d:
        shake_hands(p, d)
        with dealer(context, p.io.side_channel, keys) as bad:
            bad.send(b"x" * (1 << 17))
            eventually(lambda: counters(p).get("closed_connections", 0) >= 1)
        still_serves(p, d, 3)
        assert "garbage_peer_frames" not in counters(p)


def test_a_prefill_node_that_talks_nonsense_harms_its_own_link_only(
    context: "zmq.Context[zmq.Socket[bytes]]", caplog: pytest.LogCaptureFixture
) -> None:
    with prefill() as p, decode() as d:
        shake_hands(p, d)
        fake = context.socket(zmq.ROUTER)
        fake.linger = 0
        fake.bind("tcp://127.0.0.1:*")
        d.io.send([DialPeer("p9", fake.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"), 2)])
        assert fake.poll(5000)
        node_id = fake.recv_multipart()[0]
        for payload in MALFORMED:
            fake.send_multipart([node_id, payload])
        fake.send_multipart([node_id, b"two", b"frames"])
        numbers = itertools.count(1)
        for source in ("p9", "p1", "p9", ""):  # one speaks in another's name
            message = Envelope[ToDecode](source, "d1", next(numbers), Ping(stamp=1.0))
            fake.send_multipart([node_id, encode(message)])
        welcome = PeerWelcome(fingerprint=FINGERPRINT)
        repeated = encode(Envelope[ToDecode]("p9", "d1", 5, welcome))
        for _ in range(3):
            fake.send_multipart([node_id, repeated])
        d.get(FromPeer, lambda event: event == FromPeer("p9", 2, welcome))
        eventually(lambda: counters(d).get("peer_sequence_gaps", 0) >= 2)
        found = counters(d)
        assert found["garbage_peer_frames"] == len(MALFORMED) + 1
        assert found["stale_peer_messages"] == 2
        still_serves(p, d, 4)
        fake.close()
    for word in ("garbage_peer_frames", "stale_peer_messages", "peer_sequence_gaps"):
        assert len(lines(caplog, word)) == 1


def test_a_router_that_talks_nonsense_is_counted(
    context: "zmq.Context[zmq.Socket[bytes]]", caplog: pytest.LogCaptureFixture
) -> None:
    fake = context.socket(zmq.ROUTER)
    fake.linger = 0
    fake.bind("tcp://127.0.0.1:*")
    with decode(fake.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")) as d:
        d.io.announce(REGISTRATION)
        assert fake.poll(5000)
        node_id = fake.recv_multipart()[0]
        for payload in MALFORMED:
            fake.send_multipart([node_id, payload])
        eventually(lambda: counters(d).get("garbage_router_frames", 0) == len(MALFORMED))
    fake.close()
    assert len(lines(caplog, "garbage_router_frames")) == 1
