"""Which adapters a node has been told of, by name and by the node's own number. Pure.

    load ─▶ LOADING ─(read, checked; pinned: placed)─▶ SERVING ─unload─▶ UNLOADING ─▶ (gone)
               └──────────── failed, or unloaded ──────────────────────────▲

A number is never given twice, so nothing that was said of an adapter that is gone can answer for
one that has its name now.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from common.messages import Adapter, AdapterInfo, LoadAdapter


class Stage(Enum):
    LOADING = auto()
    """Not served yet."""
    SERVING = auto()
    UNLOADING = auto()
    """Takes no new request; ends once nobody uses it and no command of it is under way."""


class Task(Enum):
    """The one command of an adapter that is under way."""

    READ = auto()
    PLACE = auto()


@dataclass(eq=False, slots=True)
class Entry:
    """One adapter that was loaded, is being loaded, or is not gone yet."""

    number: int
    name: str
    path: str
    pinned: bool
    stage: Stage = Stage.LOADING
    digest: str = ""
    """Of its content; empty until it was read for the first time, unless the load named it."""
    rank: int = 0
    """The largest of its modules' ranks."""
    checked: bool = False
    """Its content was read and found fit once."""
    since: float | None = None
    """Pinned: when it began to wait for its slot."""
    task: Task | None = None
    loads: list[tuple[int, str]] = field(default_factory=list)
    """Tickets that wait for the load, and the digest each expects (empty: any)."""
    unloads: list[int] = field(default_factory=list)
    """Tickets that wait for its end."""


class AdapterTable:
    """All adapters of a node."""

    def __init__(self) -> None:
        self._by_name: dict[str, Entry] = {}
        self._by_number: dict[int, Entry] = {}
        self._last_number = 0
        self._infos: tuple[AdapterInfo, ...] | None = ()

    def add(self, verb: LoadAdapter) -> Entry:
        self._last_number += 1
        entry = Entry(self._last_number, verb.name, verb.path, verb.pinned, digest=verb.digest)
        self._by_name[verb.name] = self._by_number[entry.number] = entry
        return entry

    def move(self, entry: Entry, stage: Stage) -> None:
        entry.stage = stage
        self._infos = None

    def forget_name(self, entry: Entry) -> None:
        """The name is free again, though something of the entry may still be under way."""
        if self._by_name.get(entry.name) is entry:
            del self._by_name[entry.name]
        self._infos = None

    def remove(self, entry: Entry) -> None:
        self.forget_name(entry)
        del self._by_number[entry.number]

    def named(self, name: str) -> Entry | None:
        return self._by_name.get(name)

    def get(self, number: int) -> Entry | None:
        return self._by_number.get(number)

    def __getitem__(self, number: int) -> Entry:
        return self._by_number[number]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_number.values())

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def num_pinned(self) -> int:
        """Slots that belong to pinned adapters, or will."""
        return sum(entry.pinned for entry in self)

    def serving(self, adapter: Adapter) -> Entry | None:
        """What serves requests of `adapter`, if this node has that content under that name."""
        entry = self._by_name.get(adapter.name)
        if entry is None or entry.stage is not Stage.SERVING or entry.digest != adapter.digest:
            return None
        return entry

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """What this node can serve; the same object until that changes."""
        if self._infos is None:
            self._infos = tuple(
                AdapterInfo(
                    name=entry.name,
                    digest=entry.digest,
                    path=entry.path,
                    rank=entry.rank,
                    pinned=entry.pinned,
                )
                for entry in self
                if entry.stage is Stage.SERVING
            )
        return self._infos
