"""Adapters where ranks share a model: every rank reads, cuts and places its own part.

Rank 0's scheduler gives a command once and hears of it once, when all ranks have answered. A
failure anywhere is a failure of the whole; what the others had read is forgotten again.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from common.plan import (
    AdapterCommand,
    AdapterEvent,
    AdapterFailed,
    AdapterPlaced,
    AdapterRead,
    DropAdapter,
    PlaceAdapter,
    ReadAdapter,
)
from common.rank_channel import ChannelClosed, Codec, RankChannel, Topic

log = logging.getLogger(__name__)

COMMANDS: Codec[AdapterCommand] = Codec(ReadAdapter, PlaceAdapter, DropAdapter)
EVENTS: Codec[AdapterEvent] = Codec(AdapterRead, AdapterPlaced, AdapterFailed)


class Loader(Protocol):
    """See `common.engine.lora.loader.AdapterLoader`."""

    def start(self, wake: Callable[[], None]) -> None: ...

    def submit(self, commands: Sequence[AdapterCommand]) -> None: ...

    def poll(self) -> list[AdapterEvent]: ...

    def close(self) -> None: ...


class SharedAdapters:
    """Rank 0's side: its own loader and those of the ranks behind `channels`, as one.

    Of an adapter no more than one answer is awaited at a time, as the scheduler has it.
    `submit` and `poll` are for one thread and never block.
    """

    def __init__(self, local: Loader, channels: Sequence[RankChannel]) -> None:
        self._local = local
        self._channels = channels
        self._answers: deque[tuple[int, AdapterEvent]] = deque()
        self._awaited: dict[int, list[AdapterEvent | None]] = {}
        """By adapter: what each rank has answered."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to work; called once."""
        for rank, channel in enumerate(self._channels, start=1):

            def take(payload: bytes, rank: int = rank) -> None:
                self._answers.extend((rank, event) for event in EVENTS.decode(payload))
                wake()

            channel.listen(Topic.ADAPTERS, take)
        self._local.start(wake)

    def submit(self, commands: Sequence[AdapterCommand]) -> None:
        """Hand over commands, in order."""
        for command in commands:
            if not isinstance(command, DropAdapter):
                self._awaited[command.adapter] = [None] * (1 + len(self._channels))
        self._tell(commands)

    def poll(self) -> list[AdapterEvent]:
        """Everything that all ranks have answered, oldest first."""
        self._answers.extend((0, event) for event in self._local.poll())
        complete = []
        while self._answers:
            rank, event = self._answers.popleft()
            awaited = self._awaited.get(event.adapter)
            assert awaited is not None, f"rank {rank} answered what nobody asked: {event}"
            awaited[rank] = event
            answers = [answer for answer in awaited if answer is not None]
            if len(answers) == len(awaited):
                del self._awaited[event.adapter]
                complete.append(self._together(answers))
        return complete

    def close(self) -> None:
        """End this rank's part; the others end with their processes."""
        self._local.close()

    def _tell(self, commands: Sequence[AdapterCommand]) -> None:
        payload = COMMANDS.encode(commands)
        for channel in self._channels:
            try:
                channel.send(Topic.ADAPTERS, payload)
            except ChannelClosed:
                log.debug("a rank is gone, which ends this node")
        self._local.submit(commands)

    def _together(self, answers: Sequence[AdapterEvent]) -> AdapterEvent:
        """What all ranks' answers to one command come to."""
        first = answers[0]
        problem = next((answer for answer in answers if isinstance(answer, AdapterFailed)), None)
        if problem is None and any(answer != first for answer in answers):
            problem = AdapterFailed(first.adapter, "its files changed while ranks read them")
        if problem is None:
            return first
        if any(isinstance(answer, AdapterRead) for answer in answers):
            self._tell([DropAdapter(first.adapter)])
        return problem


def serve_adapters(channel: RankChannel, loader: Loader) -> None:
    """Another rank's side: `loader` carries out what comes over `channel`."""
    answering = threading.Lock()  # the loader wakes from more than one thread

    def answer() -> None:
        with answering:
            events = loader.poll()
            try:
                if events:
                    channel.send(Topic.ADAPTERS, EVENTS.encode(events))
            except ChannelClosed:
                log.debug("rank 0 is gone, which ends this process")

    channel.listen(Topic.ADAPTERS, lambda payload: loader.submit(COMMANDS.decode(payload)))
    loader.start(answer)
