"""How a node's first rank and each of its other ranks talk: one connection, several topics.

A frame is a topic and that topic's own bytes; nothing is pickled. Frames keep their order, over all
topics. A thread at each end reads and hands every frame to the topic's handler at once, so that
transfers and adapters move while a forward pass runs. The connection is half of a socket pair: its
other end is closed when the process that holds it ends, however it ends.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

log = logging.getLogger(__name__)

Handler = Callable[[bytes], None]
Item = TypeVar("Item")


class Topic(IntEnum):
    """Whose a frame is."""

    CONTROL = 0
    """Start, warm-up, end."""
    BATCH = 1
    ADAPTERS = 2
    TRANSFER = 3


class ChannelClosed(Exception):
    """The process at the other end is gone."""


class RankChannel:
    """One end. Handlers run on the channel's thread, must not block, and are there before the other
    side may speak of their topic; what one of them raises is a bug, and ends the channel."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._handlers: dict[int, Handler] = {}
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None

    def listen(self, topic: Topic, handler: Handler) -> None:
        """From now on `handler` gets the payloads of `topic`."""
        self._handlers[topic] = handler

    def start(self, on_closed: Callable[[], None]) -> None:
        """Begin to read. `on_closed` is called once, on the reading thread, when nothing comes any
        more: the other process ended, or a handler failed."""
        reading = threading.Thread(target=self._read, args=(on_closed,), daemon=True, name="ranks")
        self._thread = reading
        reading.start()

    def send(self, topic: Topic, payload: bytes) -> None:
        """Any thread; waits only while the other side has a full buffer to read.

        Raises ChannelClosed.
        """
        try:
            with self._sending:
                self._connection.send_bytes(bytes((topic,)) + payload)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def _read(self, on_closed: Callable[[], None]) -> None:
        try:
            while True:
                frame = self._connection.recv_bytes()
                self._handlers[frame[0]](frame[1:])
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("a frame between ranks could not be handled")
        on_closed()


class Codec(Generic[Item]):
    """Values of some dataclasses or structs as bytes, in order, each with the name of its type.

    For what has no tags of its own, like the commands of `common.plan`.
    """

    def __init__(self, *types: type[Item]) -> None:
        self._decoders = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in types}
        self._encode = msgspec.msgpack.Encoder().encode
        self._split = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]]).decode

    def encode(self, items: Iterable[Item]) -> bytes:
        return self._encode([(type(item).__name__, item) for item in items])

    def decode(self, payload: bytes) -> list[Item]:
        """Raises msgspec.MsgspecError, or KeyError for a type that this codec does not know."""
        return [self._decoders[name].decode(raw) for name, raw in self._split(payload)]
