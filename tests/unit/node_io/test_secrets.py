"""Nodes with and without the cluster's secret, over real sockets."""

import logging
import time
from collections.abc import Callable

import pytest

from common.credentials import ClusterKeys, Secret
from common.events import FromPeer, FromRouter, PeerClosed
from common.messages import Abort, Cancel
from common.plan import DialPeer, ToPeerMsg
from tests.unit.node_io.rig import REGISTRATION, FakeRouter, decode, eventually, prefill
from tests.unit.node_io.test_http import ask
from tests.unit.node_io.test_side_channel import shake_hands

OURS, THEIRS = (ClusterKeys.derive(Secret(f"{whose} cluster secret")) for whose in ("our", "their"))

Log = Callable[[str], list[str]]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    """The lines that begin with a word."""
    caplog.set_level(logging.INFO)

    def lines(word: str) -> list[str]:
        said = (record.getMessage() for record in caplog.records)
        return [line for line in said if line.startswith(word + " ")]

    return lines


def secured(router: FakeRouter, keys: ClusterKeys | None) -> FakeRouter:
    router.keys = keys
    router.restart(router.incarnation)
    return router


def test_a_node_joins_a_router_with_its_secret(router: FakeRouter, log: Log) -> None:
    secured(router, OURS)
    with decode(router.address, keys=OURS) as engine:
        engine.io.announce(REGISTRATION)
        router.welcome()
        router.say(Abort(1), to="d1")
        assert engine.get(FromRouter).body == Abort(1)
    assert log("refused_by_routers") == []


@pytest.mark.parametrize(("there", "here"), [(OURS, THEIRS), (OURS, None), (None, OURS)])
def test_a_node_says_who_refused_it_once_tries_seldom_and_joins_when_it_may(
    router: FakeRouter, log: Log, there: ClusterKeys | None, here: ClusterKeys | None
) -> None:
    secured(router, there)
    with decode(router.address, keys=here) as engine:
        engine.io.announce(REGISTRATION)
        eventually(lambda: log("refused_by_routers"))
        time.sleep(1.2)
        counters = ask(engine.io.url + "/server_info").json["counters"]
        assert 1 <= counters["refused_by_routers"] <= 5
        (line,) = log("refused_by_routers")
        assert router.address in line
        assert "cluster secret" in line
        secured(router, here)
        router.welcome()


def test_the_side_channel_takes_decode_nodes_with_the_secret(log: Log) -> None:
    with prefill(keys=OURS) as p, decode(keys=OURS) as d:
        shake_hands(p, d)
        d.io.send([ToPeerMsg("p1", 1, Cancel(7))])
        p.get(FromPeer, lambda event: event.body == Cancel(7))
    assert log("refused_connections") == log("refused_by_peers") == []


@pytest.mark.parametrize(("there", "here"), [(OURS, THEIRS), (OURS, None), (None, OURS)])
def test_the_side_channel_refuses_others_and_serves_on(
    log: Log, there: ClusterKeys | None, here: ClusterKeys | None
) -> None:
    with prefill(keys=there) as p, decode(keys=there) as friend, decode(keys=here) as stranger:
        shake_hands(p, friend)
        stranger.io.announce(REGISTRATION)
        stranger.io.send([DialPeer("p1", p.io.side_channel, 1)])
        stranger.get(PeerClosed)
        (line,) = log("refused_by_peers")
        assert p.io.side_channel in line
        assert "cluster secret" in line
        eventually(
            lambda: log("refused_connections") or log("broken_handshakes"), "prefill says so too"
        )
        assert len(log("refused_connections")) <= 1
        friend.io.send([ToPeerMsg("p1", 1, Cancel(8))])
        p.get(FromPeer, lambda event: event.body == Cancel(8))
        assert not [e for e in p.seen if isinstance(e, FromPeer) and e.peer != "d1"]


def test_a_node_beyond_the_loopback_wants_its_key_for_all_but_probes() -> None:
    with prefill(keys=OURS, host="0.0.0.0") as node:
        url = f"http://127.0.0.1:{node.io.url.rpartition(':')[2]}"
        assert ask(url + "/health").status in (200, 503)
        assert ask(url + "/metrics").status == 200
        for path, body in (("/server_info", None), ("/flush_cache", b""), ("/nothing", None)):
            answer = ask(url + path, body)
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.json["error"]["type"] == "authentication_error"
            wrong = ask(url + path, body, key=THEIRS.node_key.reveal())
            assert wrong.status == 401
        assert node.quiet(0) == [], "no verb reached the engine"
        info = ask(url + "/server_info", key=OURS.node_key.reveal())
        assert info.status == 200
        shown = (info.text, ask(url + "/metrics").text)
        for hidden in (OURS.node_key.reveal(), OURS.curve_secret.decode()):
            assert not any(hidden in text for text in shown)


def test_on_the_loopback_a_node_asks_for_no_key() -> None:
    with prefill(keys=OURS) as node:
        assert ask(node.io.url + "/server_info").status == 200
