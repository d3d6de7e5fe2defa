"""The adapter loader of a virtual node: a disk that fails and changes, reads and copies that take
a while, one after the other. It also checks what a real one would only suffer from."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

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
from common.settings import SchedulerSettings
from tests.unit.scheduler.model import Violation


@dataclass
class Disk:
    """Path -> digest of what lies there; shared by all nodes."""

    files: dict[str, str] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    """Paths that cannot be read at the moment."""
    changed: dict[str, str] = field(default_factory=dict)
    """Paths that hold something else at the moment."""

    def read(self, path: str) -> str | None:
        if path in self.away:
            return None
        return self.changed.get(path, self.files.get(path))

    def heal(self) -> None:
        self.away.clear()
        self.changed.clear()


@dataclass
class Job:
    command: AdapterCommand
    due: float


class FakeLoader:
    """`submit` and `poll` as the real one; `slots` is what a batch would compute with."""

    def __init__(
        self, disk: Disk, chance: random.Random, settings: SchedulerSettings, slowest_s: float = 0.6
    ) -> None:
        self.slots: dict[int, str] = {}
        self.slowest_s = slowest_s
        self.fail_next_place = False
        self.reads = self.places = 0
        self._disk = disk
        self._random = chance
        self._memory: dict[int, str] = {}
        self._most_in_memory = settings.max_loaded_loras + 1
        self._num_slots = settings.max_loras_per_batch
        self._jobs: deque[Job] = deque()
        self._busy_until = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def submit(self, commands: Sequence[AdapterCommand], now: float) -> None:
        for command in commands:
            if isinstance(command, PlaceAdapter):
                self.slots.pop(command.slot, None)  # from now on its content is a mixture
            slowness = 0.0 if isinstance(command, DropAdapter) else self._random.random()
            self._busy_until = max(now, self._busy_until) + slowness * self.slowest_s
            self._jobs.append(Job(command, self._busy_until))

    def poll(self, now: float) -> list[AdapterEvent]:
        events = []
        while self._jobs and self._jobs[0].due <= now:
            event = self._carry_out(self._jobs.popleft().command)
            if event is not None:
                events.append(event)
        return events

    def _carry_out(self, command: AdapterCommand) -> AdapterEvent | None:
        match command:
            case ReadAdapter(adapter, path, digest):
                return self._read(adapter, path, digest)
            case PlaceAdapter(adapter, slot):
                return self._place(adapter, slot)
            case DropAdapter(adapter):
                if self._memory.pop(adapter, None) is None:
                    raise Violation(f"adapter {adapter} is dropped and was not in memory")
                return None

    def _read(self, adapter: int, path: str, digest: str) -> AdapterEvent:
        if adapter in self._memory:
            raise Violation(f"adapter {adapter} is read and was in memory")
        found = self._disk.read(path)
        if found is None:
            return AdapterFailed(adapter, f"{path} cannot be read")
        if digest not in ("", found):
            return AdapterFailed(adapter, f"{path} holds something else")
        self.reads += 1
        self._memory[adapter] = found
        if len(self._memory) > self._most_in_memory:
            raise Violation(f"{len(self._memory)} adapters are in memory")
        return AdapterRead(adapter, found, rank=8)

    def _place(self, adapter: int, slot: int) -> AdapterEvent:
        if not 0 <= slot < self._num_slots:
            raise Violation(f"there is no slot {slot}")
        if adapter not in self._memory:
            raise Violation(f"adapter {adapter} is placed and not in memory")
        if self.fail_next_place:
            self.fail_next_place = False
            return AdapterFailed(adapter, "planted failure of a copy")
        self.places += 1
        self.slots[slot] = self._memory[adapter]
        return AdapterPlaced(adapter, slot)
