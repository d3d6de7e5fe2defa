"""ZMQ sockets whose sends never wait and whose readers never die."""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

import zmq
import zmq.asyncio

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""Beyond this ZMQ drops the connection. A prompt of a million tokens is about 5 MB."""
SEND_QUEUE = 10_000
"""Messages that may wait for a slow peer; the next are dropped, counted, and leave a gap."""
RECONNECT_MS = (100, 1000)
FLUSH_MS = 200
"""How long a goodbye may still travel after its socket is closed."""
READS_PER_TURN = 64
REPORT_EVERY_S = 10.0

Frames = list[bytes]


class Tally:
    """Counts what went wrong on the sockets; some of each kind get a log line."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def add(self, what: str, detail: str = "") -> None:
        """Count, and say so at most once in 10 s for each kind."""
        self.counts[what] += 1
        now = time.monotonic()
        if now - self._logged_at.get(what, -REPORT_EVERY_S) >= REPORT_EVERY_S:
            self._logged_at[what] = now
            log.warning("%s (%d so far) %s", what, self.counts[what], detail)


def routing_id(incarnation: str) -> bytes:
    """Fresh for each connection, so that a new one is never taken for a dead one's."""
    return f"{incarnation}.{os.urandom(4).hex()}".encode()[-255:]


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

    def watch_connections(self, connected: Callable[[], None], broken: Callable[[], None]) -> None:
        """Call back when the transport comes up (handshake done) and when it breaks."""
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        monitor = self._monitor = self.zmq.get_monitor_socket(events)

        def handle(frames: Frames) -> None:
            event = int.from_bytes(frames[0][:2], "little")
            (connected if event == zmq.Event.HANDSHAKE_SUCCEEDED else broken)()

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


async def read(socket: zmq.asyncio.Socket, handle: Callable[[Frames], None]) -> None:
    """Hand over every message. An error in `handle` is ours: logged, never the reader's end."""
    count = 0
    while True:
        frames = await socket.recv_multipart()
        try:
            handle(frames)
        except Exception:
            log.exception("a message could not be handled")
        count += 1
        if count % READS_PER_TURN == 0:
            await asyncio.sleep(0)  # a receive that is ready at once does not yield to others
