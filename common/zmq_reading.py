"""Reading ZMQ sockets inside an event loop, with a reader that never dies."""

import asyncio
import logging
from collections.abc import Callable

import zmq.asyncio

log = logging.getLogger(__name__)

READS_PER_TURN = 64

Frames = list[bytes]


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


def parse_event(frames: Frames) -> tuple[int, int]:
    """(event, value) of a message from a socket's monitor."""
    return int.from_bytes(frames[0][:2], "little"), int.from_bytes(frames[0][2:6], "little")
