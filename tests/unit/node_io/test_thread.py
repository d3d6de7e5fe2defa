"""The thread's life: binding, ending, what is left behind, and what it costs."""

import os
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from common.modes import DisaggregationMode
from common.node_io.peer_server import PeerServer
from common.node_io.settings import CannotBind
from common.node_io.thread import NodeIO
from common.plan import DialPeer, HangUp
from tests.unit.node_io.rig import (
    REGISTRATION,
    FakeRouter,
    decode,
    eventually,
    identity,
    prefill,
    settings,
)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> int:
    return psutil.Process().num_threads()


def test_closing_leaves_no_thread_and_no_descriptor(router: FakeRouter) -> None:
    def life() -> None:
        with prefill(router.address) as p, decode(router.address) as d:
            p.io.announce(REGISTRATION)
            d.io.announce(REGISTRATION)
            router.welcome()
            router.welcome()
            d.io.send(
                [DialPeer("p1", p.io.side_channel, 1), DialPeer("p2", "tcp://127.0.0.1:9", 2)]
            )
            p.io.wait(1.0)
            d.io.send([HangUp("p2", 2)])

    life()  # libraries open what they keep on first use
    descriptors, running = open_descriptors(), threads()
    for _ in range(3):
        life()
    eventually(lambda: open_descriptors() <= descriptors, "descriptors leak")
    eventually(lambda: threads() <= running, "threads leak")
    assert not [t for t in threading.enumerate() if "pdserve" in t.name]


def test_closing_is_quick_and_can_be_repeated() -> None:
    with decode("tcp://127.0.0.1:9") as engine:
        engine.io.announce(REGISTRATION)
        began = time.monotonic()
        engine.io.close()
        assert time.monotonic() - began < 2.0
        engine.io.close()
        engine.io.wake()
        engine.io.wait(0.0)
        engine.io.send([HangUp("p1", 1)])
        engine.io.announce(REGISTRATION)


@pytest.mark.parametrize("what", ["HTTP", "side channel"])
def test_a_port_in_use_is_an_error_at_start(what: str) -> None:
    before = open_descriptors()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        is_http = what == "HTTP"
        io = NodeIO(
            identity(DisaggregationMode.PREFILL, "p1"),
            settings(port=port if is_http else 0),
            PeerServer(0 if is_http else port),
        )
        with pytest.raises(CannotBind, match=f"{what} cannot listen at 127.0.0.1:{port}"):
            io.start()
    eventually(lambda: open_descriptors() <= before, "descriptors leak")


def test_an_unknown_host_is_an_error_at_start() -> None:
    who = identity(DisaggregationMode.PREFILL, "p1")
    io = NodeIO(who, settings(host="no.such.host.invalid"), PeerServer())
    with pytest.raises(CannotBind, match=r"no\.such\.host"):
        io.start()


def test_a_router_address_that_is_none_is_an_error_at_construction() -> None:
    with pytest.raises(ValueError, match="tcp://host:port"):
        NodeIO(
            identity(DisaggregationMode.PREFILL, "p1"), settings("http://x:1"), PeerServer()
        ).start()


def test_an_idle_thread_costs_next_to_nothing(router: FakeRouter) -> None:
    with prefill(router.address, heartbeat_s=0.5, router_timeout_s=60.0) as engine:
        engine.io.announce(REGISTRATION)
        router.welcome()
        process, began = psutil.Process(os.getpid()), time.monotonic()
        before = process.cpu_times()
        engine.io.wait(2.0)
        after, seconds = process.cpu_times(), time.monotonic() - began
        used = after.user + after.system - before.user - before.system
        assert seconds > 1.5, "nothing arrives at an idle node"
        assert used / seconds < 0.02
