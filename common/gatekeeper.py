"""Who may connect to a listening ZMQ socket: CURVE with the cluster's keys, and who was refused.

A client must know the server's public key to begin the handshake, and must own the pair to end it
(libzmq asks over ZAP, RFC 27). Both are the one pair that the cluster secret gives, so that a
process proves the secret and nothing is configured for each pair of processes.

libzmq says what became of a connection to a monitor: ACCEPTED with the descriptor, then either
HANDSHAKE_SUCCEEDED or one of HANDSHAKE_FAILED_*, which name no peer but are followed at once by the
DISCONNECTED of the same descriptor (one I/O thread a context makes them).
"""

import asyncio
import errno
import logging
import os
import socket as tcp
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85

from common.credentials import ClusterKeys
from common.tally import Tally
from common.zmq_reading import parse_event, read

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"pdserve"
MAX_OPEN_CONNECTIONS = 4096
"""Of which addresses are remembered."""
NAMELESS_S = 2.0

CRYPTOGRAPHIC = 0x11000001  # ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH

FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


class NoCurve(RuntimeError):
    """This libzmq was built without CURVE."""


def require_curve() -> None:
    """Raises NoCurve."""
    if not zmq.has("curve"):
        raise NoCurve("a cluster secret needs a libzmq with CURVE, which this one lacks")


def dial_with(socket: "zmq.Socket[Any]", keys: ClusterKeys | None) -> None:
    """Before `connect`: prove the secret to whoever listens, and demand the same of it."""
    if keys is not None:
        socket.curve_publickey = keys.curve_public
        socket.curve_secretkey = keys.curve_secret
        socket.curve_serverkey = keys.curve_public


def why_refused(event: int, value: int, *, secured: bool) -> str:
    """A failed handshake in words; `secured`: this process has a cluster secret."""
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH or value == CRYPTOGRAPHIC:
        return "the other side has another cluster secret"
    if value == MECHANISM_MISMATCH:
        return f"the other side has {'no' if secured else 'a'} cluster secret, unlike this one"
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
        return f"the handshake is malformed ({value:#x})"
    cause = errno.errorcode.get(value, str(value))
    return f"the other side broke the handshake off ({cause}): has it the same cluster secret?"


class Gatekeeper:
    """Guards the listening sockets of one context. Use from the event loop's thread only."""

    def __init__(self, context: "zmq.Context[Any]", keys: ClusterKeys | None, tally: Tally) -> None:
        """`context` must have one I/O thread; the monitor's events are in order only then."""
        self._context = zmq.asyncio.Context.shadow(context)
        self._keys = keys
        self._tally = tally
        self._sockets: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_monitors: list[Callable[[], object]] = []
        if keys is not None:
            require_curve()
            self._answer_zap(keys)

    def guard(self, socket: "zmq.Socket[Any]") -> None:
        """Before `bind`: let in only who proves the secret, if there is one, and log the others."""
        if self._keys is not None:
            socket.curve_server = 1
            socket.curve_publickey = self._keys.curve_public
            socket.curve_secretkey = self._keys.curve_secret
            socket.zap_domain = ZAP_DOMAIN
        address = f"inproc://pdserve-monitor-{os.urandom(8).hex()}"
        accepted, gone = zmq.Event.ACCEPTED, zmq.Event.DISCONNECTED
        socket.monitor(address, accepted | gone | zmq.Event.HANDSHAKE_SUCCEEDED | FAILURES)
        self._stop_monitors.append(lambda: None if socket.closed else socket.disable_monitor())
        monitor = self._open(zmq.PAIR)
        monitor.connect(address)
        later = asyncio.get_running_loop().call_later
        door = Door(self._tally, later, secured=self._keys is not None)
        self._read(monitor, lambda frames: door.on_event(*parse_event(frames)))

    def close(self) -> None:
        """Call before the context is ended."""
        for task in self._tasks:
            task.cancel()
        for stop in self._stop_monitors:
            stop()
        for socket in self._sockets:
            socket.close(0)

    def _answer_zap(self, keys: ClusterKeys) -> None:
        ours = z85.decode(keys.curve_public)
        zap = self._open(zmq.ROUTER)  # REP would lose its turn with one malformed request
        zap.bind(ZAP_ADDRESS)

        def answer(frames: list[bytes]) -> None:
            sender, empty, version, number, _domain, _peer, _id, mechanism, *credentials = frames
            fits = mechanism == b"CURVE" and credentials == [ours]
            status = (b"200", b"") if fits else (b"400", b"not this cluster's key")
            zap.send_multipart([sender, empty, version, number, *status, b"", b""])

        self._read(zap, answer)

    def _open(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        self._sockets.append(socket)
        return socket

    def _read(self, socket: zmq.asyncio.Socket, handle: Callable[[list[bytes]], None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(read(socket, handle)))


class Door:
    """What the monitor of one listening socket tells, put together by connection."""

    def __init__(
        self, tally: Tally, later: Callable[[float, Callable[[], None]], object], *, secured: bool
    ) -> None:
        """`later` calls back after some seconds. `secured`: there is a cluster secret."""
        self._tally = tally
        self._later = later
        self._secured = secured
        self._open: dict[int, tuple[str | None, int]] = {}
        """Descriptor -> (peer, handshakes that had succeeded when it was accepted)."""
        self._num_succeeded = 0
        self._failure: str | None = None
        self._left: str | None = None
        self._num_named = 0
        self._waits_for_name = False

    def on_event(self, event: int, value: int) -> None:
        """Take in one event; refusals are counted, and logged at most once in 10 s an address."""
        match event:
            case zmq.Event.ACCEPTED:
                if len(self._open) < MAX_OPEN_CONNECTIONS:
                    self._open[value] = (peer_of(value), self._num_succeeded)
            case zmq.Event.HANDSHAKE_SUCCEEDED:
                self._num_succeeded += 1
            case zmq.Event.DISCONNECTED:
                self._on_gone(value)
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                self._left = errno.errorcode.get(value, str(value))
            case _:
                self._failure = why_refused(event, value, secured=self._secured)

    def _on_gone(self, descriptor: int) -> None:
        peer, num_succeeded = self._open.pop(descriptor, (None, -1))
        failure, self._failure = self._failure, None
        left, self._left = self._left, None
        if failure is None and left is not None:
            self._on_left(peer, left)
            return
        if failure is None and num_succeeded == self._num_succeeded:
            failure = "what it sends is no ZMTP"  # nobody succeeded meanwhile, nor did this one
        if failure is None:
            # It left, or ZMQ dropped it for a message over the limit: nothing tells which.
            self._tally.counts["closed_connections"] += 1
            host = (peer or "").rpartition(":")[0]
            self._tally.tell("closed_connections", f"from {peer}", host, logging.INFO)
            return
        self._tally.counts["refused_connections"] += 1
        if peer is None:
            self._tell_nameless(failure)
        else:
            self._num_named += 1
            host = peer.rpartition(":")[0]
            self._tally.tell("refused_connections", f"from {peer}: {failure}", key=host)

    def _on_left(self, peer: str | None, cause: str) -> None:
        """A probe by TCP, or somebody who saw before us that the handshake cannot succeed. Who is
        of this cluster tries again, and then it may be us who sees why."""
        self._tally.counts["broken_handshakes"] += 1
        host = (peer or "").rpartition(":")[0]
        self._tally.tell("broken_handshakes", f"from {peer} ({cause})", host, logging.INFO)

    def _tell_nameless(self, failure: str) -> None:
        """Its descriptor was closed before we could ask whose it was. Who tries again, as our own
        processes do, is named soon; only otherwise a line without an address is better than none.
        """
        if self._waits_for_name:
            return
        self._waits_for_name = True
        num_named = self._num_named

        def tell() -> None:
            self._waits_for_name = False
            if num_named == self._num_named:
                self._tally.tell("refused_connections", f"from an unknown address: {failure}")

        self._later(NAMELESS_S, tell)


def peer_of(descriptor: int) -> str | None:
    """host:port at the other end; None if the connection has ended already."""
    try:
        with tcp.fromfd(descriptor, tcp.AF_INET, tcp.SOCK_STREAM) as copy:
            host, port = copy.getpeername()[:2]
    except (OSError, ValueError):
        return None
    return f"{host}:{port}"
