"""Carries out a scheduler's adapter commands beside the engine, which never waits for a disk, a hub
or a copy.

One thread works commands off in order. It does a millisecond's work, then rests for three, so that
running streams keep their pace however large an adapter is, also where the processor that it works
on is not a spare one. It has the priority of the others: with a lower one it was put aside while it
held the GIL, and the engine waited for it for a second. What has to come from a hub is fetched on
a thread of its own meanwhile, and read in its turn once it is here.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, assert_never

from common.engine.errors import AdapterError
from common.engine.lora.adapter import LoraAdapter, part_of
from common.engine.lora.pool import LoraPool
from common.engine.lora.reader import fetch_adapter, find_adapter, read_folder
from common.engine.parallel.shards import Shard
from common.mailbox import Mailbox
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

log = logging.getLogger(__name__)

WORK_S = 0.001
"""Work between two rests; a single read or hash of one tensor may take longer."""
RESTS = 3
"""Times as long as it worked before."""
MAX_REST_S = 0.03
JOIN_S = 2.0
"""How long `close` waits."""
CLOSED = "this node is ending"


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What a command wants read is on this machine now."""

    command: ReadAdapter
    folder: Path

    @property
    def adapter(self) -> int:
        return self.command.adapter


C = TypeVar("C", bound=AdapterCommand | _Fetched)


class _Closing(BaseException):
    """The loader is asked to end; not an Exception, so that nobody takes it for a failure."""


class AdapterLoader:
    """Reads a rank's part of adapters into host memory and places them into the slots of `pool`,
    which was made for that part. Digests are of whole adapters.

    Every `ReadAdapter` and `PlaceAdapter` ends with exactly one event, in the order of submission
    but for what is fetched, except for those that `close` overtakes on a thread that does not end
    in time. `submit` and `poll` are for one thread and never block. `wake` is called, on any
    thread, after something new became available to `poll`.
    """

    def __init__(self, shard: Shard, pool: LoraPool) -> None:
        self._shard = shard
        self._pool = pool
        self._adapters: dict[int, LoraAdapter] = {}
        self._mail: Mailbox[AdapterCommand | _Fetched, AdapterEvent] = Mailbox()
        self._closing = threading.Event()
        self._closed = False
        self._rested_at = 0.0
        self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)

    # ------------------------------------------------------------ the engine thread

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to work; called once."""
        self._mail.wake = wake
        self._thread.start()

    def submit(self, commands: Sequence[AdapterCommand]) -> None:
        """Hand over commands, in order. After `close` they fail at once."""
        self._mail.post(commands)
        if self._closed:
            self._refuse_queued()

    def poll(self) -> list[AdapterEvent]:
        """Everything new, oldest first; still answers after `close`."""
        return self._mail.poll()

    def close(self) -> None:
        """End within `JOIN_S`, also in the middle of a command; what is unfinished fails."""
        if self._closed:
            return
        self._closing.set()
        self._mail.commands.put(None)
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        if self._thread.is_alive():
            log.warning("the loader of adapters is still at work; it ends with this process")
        self._closed = True
        self._refuse_queued()

    def _refuse_queued(self) -> None:
        for command in self._mail.unread():
            if not isinstance(command, DropAdapter):
                self._mail.publish([AdapterFailed(command.adapter, CLOSED)])

    # ------------------------------------------------------------ the loader thread

    def _run(self) -> None:
        while not self._closing.is_set():
            command = self._mail.commands.get()
            if command is None:
                return
            self._rested_at = time.monotonic()
            self._attempt(command, self._handle)

    def _attempt(self, command: C, work: Callable[[C], AdapterEvent | None]) -> None:
        """Publish what comes of it, if that is known already, or why nothing does."""
        try:
            event = work(command)
        except AdapterError as error:
            event = AdapterFailed(command.adapter, str(error))
        except _Closing:
            event = AdapterFailed(command.adapter, CLOSED)
        except Exception as error:
            log.exception("an adapter command failed: %s", command)
            event = AdapterFailed(command.adapter, f"{type(error).__name__}: {error}")
        if event is not None:
            self._mail.publish([event])

    def _handle(self, command: AdapterCommand | _Fetched) -> AdapterEvent | None:
        match command:
            case ReadAdapter():
                self._adapters.pop(command.adapter, None)
                folder = find_adapter(command.path)
                if folder is not None:
                    return self._read(command, folder)
                work = (command, self._fetch)
                threading.Thread(target=self._attempt, args=work, daemon=True).start()
                return None
            case _Fetched(wanting, folder):
                return self._read(wanting, folder)
            case PlaceAdapter(number, slot):
                adapter = self._adapters.get(number)
                if adapter is None:
                    raise AdapterError("it is not in memory")
                self._pool.place(slot, adapter, self._rest)
                return AdapterPlaced(number, slot)
            case DropAdapter(number):
                self._adapters.pop(number, None)
                return None
            case _:
                assert_never(command)

    def _fetch(self, command: ReadAdapter) -> None:
        """On a thread of its own: a hub may take minutes, and others' adapters are not to wait."""
        folder = fetch_adapter(command.path, newest=not command.digest)
        self._mail.post([_Fetched(command, folder)])
        if self._closed:
            self._refuse_queued()

    def _read(self, command: ReadAdapter, folder: Path) -> AdapterRead:
        began = time.monotonic()
        adapter = read_folder(folder, self._shard.spec, self._pool.max_rank, self._rest)
        if command.digest and adapter.digest != command.digest:
            raise AdapterError(
                f"{command.path} has other content here: its digest is {adapter.digest}, "
                f"{command.digest} is wanted"
            )
        self._adapters[command.adapter] = part_of(adapter, self._shard, self._rest)
        log.info("read %s in %.2f s", command.path, time.monotonic() - began)
        return AdapterRead(command.adapter, adapter.digest, adapter.rank)

    def _rest(self) -> None:
        """Called often; sleeps only after work worth resting for. Raises when closing."""
        worked_s = time.monotonic() - self._rested_at
        if worked_s >= WORK_S or self._closing.is_set():
            if self._closing.wait(min(RESTS * worked_s, MAX_REST_S)):
                raise _Closing
            self._rested_at = time.monotonic()
