"""The socket that nodes dial: bytes in, envelopes out, and nothing that comes in can break it.

One ZMQ ROUTER. Reading is driven by the event loop's reader on the socket's descriptor, which is
edge-triggered: whoever sends or reads must afterwards look again, or a wake-up is lost. So each
send schedules a read. Sends never block; what cannot be delivered is reported at once.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq

from common.credentials import ClusterKeys
from common.gatekeeper import Gatekeeper
from common.messages import (
    WIRE_VERSION,
    Envelope,
    FromNode,
    ToNode,
    decode_introduction,
    decode_to_router,
    encode,
)
from common.tally import Tally

log = logging.getLogger("router.link")

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""A step's tokens with all their logprobs are well below 1 MB; ZMQ drops who sends more."""
RECEIVE_QUEUE = 1000
"""Messages of one node that may wait here; then they wait at the node."""
READS_PER_TURN = 32
"""After so many messages other tasks get their turn."""
LINGER_MS = 300
"""How long the last messages may take to leave at shutdown."""

# The wrappers for many frames and for flags take as long as all of ZMQ's own work.
_AT_ONCE = int(zmq.NOBLOCK)
_READABLE = int(zmq.POLLIN)
_FIRST = int(zmq.NOBLOCK | zmq.SNDMORE)

OnMessage = Callable[[bytes, FromNode], None]


class NodeLink:
    """Owner of the ROUTER socket. Use from the event loop's thread only."""

    def __init__(
        self,
        on_message: OnMessage,
        on_turn: Callable[[], None],
        tally: Tally,
        keys: ClusterKeys | None,
    ) -> None:
        """`on_turn`: all that was there has been read, or other tasks get their turn.

        `keys`: only who has the cluster's secret may connect; None lets everybody in.
        """
        self._on_message = on_message
        self._on_turn = on_turn
        self._tally = tally
        self._keys = keys
        self._gate: Gatekeeper | None = None
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_scheduled = False

    def open(self, host: str, port: int) -> int:
        """Bind and start to read; returns the port.

        Raises:
            OSError: the address cannot be bound.
            NoCurve: there are keys, and a libzmq that can do nothing with them.
        """
        self._gate = Gatekeeper(self._context, self._keys, self._tally)
        self._gate.guard(self._socket)
        is_ipv6 = ":" in host
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6))
        address = f"tcp://[{host}]" if is_ipv6 else f"tcp://{host}"
        try:
            if port:
                self._socket.bind(f"{address}:{port}")
            else:
                port = self._socket.bind_to_random_port(address)
        except zmq.ZMQError as error:
            raise OSError(
                error.errno, f"cannot listen for nodes on {host}:{port}: {error}"
            ) from None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._read_soon()
        return port

    def send(self, routing_id: bytes, envelope: Envelope[ToNode]) -> bool:
        """Hand one message to ZMQ. False: there is no connection behind this routing id."""
        try:
            self._socket.send(routing_id, _FIRST)
            self._socket.send(encode(envelope), _AT_ONCE)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        finally:
            self._read_soon()
        return True

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        if self._gate is not None:
            self._gate.close()
        self._socket.close()
        self._context.term()

    def _read_soon(self) -> None:
        if self._loop is not None and not self._read_scheduled:
            self._read_scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_scheduled = False
        if self._loop is None:
            return
        try:
            receive = self._socket.recv
            for count in range(READS_PER_TURN):
                # Most turns bring one message or none: to ask is cheaper than to be refused.
                if count < 2 and not int(self._socket.get(zmq.EVENTS)) & _READABLE:
                    return
                try:
                    routing_id = receive(_AT_ONCE)
                    frame = receive(_AT_ONCE, copy=False)
                except zmq.Again:
                    return
                self._take(routing_id, frame)
            self._read_soon()
        finally:
            self._on_turn()

    def _take(self, routing_id: bytes, frame: zmq.Frame) -> None:
        if frame.more:
            self._socket.recv_multipart(_AT_ONCE)
            self._tally.add("garbage_frames", "more than one frame")
            return
        try:
            envelope = decode(frame.buffer)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            size = len(frame)
            self._tally.add("garbage_frames", f"{size} bytes that are no message: {error}")
            return
        try:
            self._on_message(routing_id, envelope)
        except Exception:
            # One node's strange message must not end the reading of all others'.
            log.exception("a message of %s was not handled", envelope.source)
            self._tally.counts["unhandled_messages"] += 1


def decode(payload: bytes | memoryview) -> FromNode:
    """A node's message, or what can be understood of another wire version's `Hello`.

    Raises:
        msgspec.MsgspecError: neither.
    """
    try:
        return decode_to_router(payload)
    except msgspec.ValidationError:
        introduction = decode_introduction(payload)
        if introduction.body.fingerprint.wire_version == WIRE_VERSION:
            raise  # not a version's difference, a malformed message
        return introduction
