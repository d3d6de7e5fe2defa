"""What a plain connection tells of a process, tried with real sockets and a stopped process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from common.events import PeerProbed, Reach
from common.node_io.addresses import Endpoint
from common.node_io.probe import probe
from common.plan import ProbePeer
from tests.unit.node_io.rig import decode

LISTENER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


def ask(host: str, port: int) -> Reach:
    return asyncio.run(probe(Endpoint(host, port), timeout_s=0.5))


@contextmanager
def listener() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that listens and never accepts."""
    command = [sys.executable, "-c", LISTENER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_a_stopped_process_is_listening_and_a_killed_one_is_gone() -> None:
    with listener() as (process, port):
        assert ask("127.0.0.1", port) is Reach.LISTENING
        os.kill(process.pid, signal.SIGSTOP)
        assert ask("127.0.0.1", port) is Reach.LISTENING
        process.kill()
        process.wait()
        assert ask("127.0.0.1", port) is Reach.GONE


def test_a_name_is_gone_only_if_all_its_addresses_refuse() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert ask("localhost", server.getsockname()[1]) is Reach.LISTENING
    assert ask("localhost", 9) is Reach.GONE


def test_no_answer_proves_nothing() -> None:
    """A full backlog looks as a host behind a broken cable does: nobody answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        filling = [socket.socket() for _ in range(4)]
        for client in filling:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        assert ask("127.0.0.1", port) is Reach.UNREACHABLE
        for client in filling:
            client.close()
    assert ask("no-such-host.invalid", 9) is Reach.UNREACHABLE


def test_the_engine_is_answered() -> None:
    with decode() as node, listener() as (_, port):
        node.io.send(
            [
                ProbePeer("p1", f"tcp://127.0.0.1:{port}"),
                ProbePeer("p2", "tcp://127.0.0.1:9"),
                ProbePeer("p3", "nonsense"),
            ]
        )
        answers = {node.get(PeerProbed) for _ in range(3)}
        assert answers == {
            PeerProbed("p1", Reach.LISTENING),
            PeerProbed("p2", Reach.GONE),
            PeerProbed("p3", Reach.UNREACHABLE),
        }
