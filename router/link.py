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

from common.messages import Envelope, ToNode, ToRouter, decode_to_router, encode

log = logging.getLogger("router.link")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
READS_PER_TURN = 256
"""After so many messages other tasks get their turn."""
LINGER_MS = 300
"""How long the last messages may take to leave at shutdown."""

OnMessage = Callable[[bytes, Envelope[ToRouter]], None]


class NodeLink:
    """Owner of the ROUTER socket. Use from the event loop's thread only."""

    def __init__(self, on_message: OnMessage, on_garbage: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_garbage = on_garbage
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_scheduled = False

    def open(self, host: str, port: int) -> int:
        """Bind and start to read; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
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
            self._socket.send_multipart([routing_id, encode(envelope)], flags=zmq.NOBLOCK)
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
        for _ in range(READS_PER_TURN):
            try:
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._read_soon()

    def _take(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise ValueError(f"{len(frames)} frames")
            envelope = decode_to_router(frames[1])
        except (msgspec.DecodeError, ValueError) as error:
            log.warning("dropped %d bytes that are no message: %s", sum(map(len, frames)), error)
            self._on_garbage()
            return
        try:
            self._on_message(frames[0], envelope)
        except Exception:
            # One node's strange message must not end the reading of all others'.
            log.exception("a message of %s was not handled", envelope.source)
            self._on_garbage()
