"""The transfer of another rank of this node: a backend here, the real one in the rank's process.

    rank 0's process                                     the rank's process
    RemoteTransfer ── commands ──▶ RankChannel ──▶ thread of serve_transfer ──▶ its backend
          ▲──────────── events ◀── RankChannel ◀──────────────┘  ◀── wake ──────────┘

Leases travel as values of the monotonic clock, which all processes of a machine share: the seconds
that remain would be stretched by however long a frame waits for its reader.

A rank that dies takes its node with it, which is the business of whoever made the ranks. Until then
nothing more is said of what the rank was doing: its writes have no end that is known here, and what
they brought, or were brought, is not reported.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from common.mailbox import Mailbox
from common.messages import PeerMemory
from common.plan import (
    AddPeer,
    ExpectWrites,
    Notified,
    PeerAdded,
    PeerFailed,
    RemovePeer,
    RenewLease,
    TransferCommand,
    TransferEvent,
    Write,
    WriteDone,
    WriteFailed,
)
from common.rank_channel import ChannelClosed, Codec, Topic
from transfer.base import TransferBackend
from transfer.threaded import CLOSED, DRAIN_S, JOIN_S

log = logging.getLogger(__name__)

CLOSE_S = DRAIN_S + JOIN_S + 1.0
"""How long `close` waits for the rank's word that its backend is closed."""


class Channel(Protocol):
    """What is needed of a `RankChannel`."""

    def listen(self, topic: Topic, handler: Callable[[bytes], None]) -> None: ...

    def send(self, topic: Topic, payload: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Close:
    """To the rank: close the backend; answered with `Closed`."""


@dataclass(frozen=True, slots=True)
class Closed:
    """From the rank: all events of what it was given before `Close` have been sent."""


COMMANDS: Codec[TransferCommand | Close] = Codec(
    AddPeer, RemovePeer, RenewLease, Write, ExpectWrites, Close
)
EVENTS: Codec[TransferEvent | Closed] = Codec(
    PeerAdded, PeerFailed, WriteDone, WriteFailed, Notified, Closed
)


class RemoteTransfer:
    """A `TransferBackend` whose work is done in another process. `memory`: what that registered."""

    def __init__(self, channel: Channel, memory: PeerMemory) -> None:
        self._channel = channel
        self._memory = memory
        self._mail: Mailbox[TransferCommand, TransferEvent] = Mailbox()
        self._close_said = threading.Event()
        self._closed = False
        channel.listen(Topic.TRANSFER, self._on_events)

    @property
    def memories(self) -> tuple[PeerMemory, ...]:
        return (self._memory,)

    def start(self, wake: Callable[[], None]) -> None:
        self._mail.wake = wake

    def submit(self, commands: Sequence[TransferCommand]) -> None:
        if self._closed:
            refused = [
                WriteFailed(c.room, c.chunk, CLOSED) for c in commands if isinstance(c, Write)
            ]
            self._mail.publish(refused)
        else:
            self._send(commands)

    def poll(self) -> list[TransferEvent]:
        return self._mail.poll()

    def close(self) -> None:
        """Bounded by `CLOSE_S`. Without the rank's answer the ends of its writes are not known."""
        if self._closed:
            return
        if self._send([Close()]) and not self._close_said.wait(CLOSE_S):
            log.error("a rank does not close its transfer; its writes have no known end")
        self._closed = True

    def _send(self, commands: Iterable[TransferCommand | Close]) -> bool:
        try:
            self._channel.send(Topic.TRANSFER, COMMANDS.encode(commands))
        except ChannelClosed:
            log.error("a rank is gone; its writes have no known end")
            return False
        return True

    def _on_events(self, payload: bytes) -> None:
        """On the channel's thread."""
        said = EVENTS.decode(payload)
        self._mail.publish([event for event in said if not isinstance(event, Closed)])
        if any(isinstance(event, Closed) for event in said):
            self._close_said.set()


def serve_transfer(
    channel: Channel, backend: TransferBackend, on_failure: Callable[[], None] | None = None
) -> None:
    """In the rank's process, before the channel starts: do with `backend` what rank 0 says.

    It gets a thread of its own, which ends when the backend is closed or the channel is. A bug in
    it ends the process, and so the node, unless `on_failure` does something else.
    """
    obedience = _Obedience(channel, backend, on_failure or _end_process)
    threading.Thread(target=obedience.run, name="rank-transfer", daemon=True).start()


class _Obedience:
    """Stands for the engine thread towards a backend."""

    def __init__(
        self, channel: Channel, backend: TransferBackend, on_failure: Callable[[], None]
    ) -> None:
        self._channel = channel
        self._backend = backend
        self._on_failure = on_failure
        self._queue: SimpleQueue[list[TransferCommand | Close]] = SimpleQueue()
        channel.listen(Topic.TRANSFER, lambda payload: self._queue.put(COMMANDS.decode(payload)))

    def run(self) -> None:
        try:
            self._backend.start(lambda: self._queue.put([]))
            while self._turn():
                pass
        except ChannelClosed:
            log.info("rank 0 is gone")
        except Exception:
            log.exception("the transfer of this rank failed")
            self._on_failure()

    def _turn(self) -> bool:
        """Wait for commands or a wake-up; obey, tell what is new. False once all is closed."""
        told = self._queue.get()
        commands = [command for command in told if not isinstance(command, Close)]
        closing = len(commands) < len(told)
        if commands:
            self._backend.submit(commands)
        if closing:
            self._backend.close()
        events: list[TransferEvent | Closed] = [*self._backend.poll()]
        if closing:
            events.append(Closed())
        if events:
            self._channel.send(Topic.TRANSFER, EVENTS.encode(events))
        return not closing


def _end_process() -> None:
    os._exit(1)
