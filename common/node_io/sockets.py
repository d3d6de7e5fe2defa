"""ZMQ sockets whose sends never wait and whose readers never die."""

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import cast

import zmq
import zmq.asyncio

from common.gatekeeper import FAILURES
from common.zmq_reading import Frames, parse_event, read

MAX_MESSAGE_BYTES = 64 << 20
"""Beyond this ZMQ drops the connection. A prompt of a million tokens is about 5 MB."""
SEND_QUEUE = 10_000
"""Messages that may wait for a slow peer; the next are dropped, counted, and leave a gap."""
RECONNECT_MS = (100, 1000)
FLUSH_MS = 200
"""How long a goodbye may still travel after its socket is closed."""


def routing_id(incarnation: str) -> bytes:
    """Fresh for each connection, so that a new one is never taken for a dead one's."""
    return f"{incarnation}.{os.urandom(4).hex()}".encode()[-255:]


def _nothing() -> None:
    """What follows from an event that nobody asked for."""


class MessageSocket:
    """One ZMQ socket inside the loop, with its reader task."""

    def __init__(self, socket: zmq.asyncio.Socket, handle: Callable[[Frames], None]) -> None:
        """`handle` is called in the loop with the frames of each message."""
        socket.linger = 0
        socket.sndhwm = SEND_QUEUE
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
        self.zmq = socket
        self._handle = handle
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Read from now on."""
        self._tasks.append(asyncio.create_task(read(self.zmq, self._handle)))

    def watch_connections(
        self,
        *,
        refused: Callable[[int, int], None],
        connected: Callable[[], None] = _nothing,
        broken: Callable[[], None] = _nothing,
    ) -> None:
        """Call back when the transport comes up (handshake done), breaks, or is refused.

        `refused` gets the monitor's event and value, see `why_refused`. After some refusals ZMQ
        does not try again: whoever wants to must open another socket.
        """
        succeeded = zmq.Event.HANDSHAKE_SUCCEEDED
        events = succeeded | zmq.Event.DISCONNECTED | FAILURES
        monitor = self._monitor = self.zmq.get_monitor_socket(events)

        def handle(frames: Frames) -> None:
            event, value = parse_event(frames)
            if event == succeeded:
                connected()
            elif event == zmq.Event.DISCONNECTED:
                broken()
            else:
                refused(event, value)

        self._tasks.append(asyncio.create_task(read(monitor, handle)))

    def send(self, frames: Sequence[bytes]) -> bool:
        """Queue a message; False if nobody is connected, the queue is full, or the id unknown."""
        if self.zmq.closed:
            return False
        queued = self.zmq.send_multipart(list(frames), flags=zmq.NOBLOCK)
        sent = cast("asyncio.Future[object]", queued)
        error = sent.exception()  # with NOBLOCK the future is always done
        if error is not None and not isinstance(error, zmq.ZMQError):
            raise error
        return error is None

    def close(self, linger_ms: int = 0) -> None:
        """Stop reading and close; queued messages get `linger_ms` to leave."""
        for task in self._tasks:
            task.cancel()
        if self._monitor is not None:
            self.zmq.disable_monitor()
            self._monitor.close(0)
        self.zmq.close(linger_ms)
