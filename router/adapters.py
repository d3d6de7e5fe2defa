"""Which LoRA adapters the cluster has. Pure: what nodes list and what verbs decide go in.

    --lora           a node has read it              unload                 gone from all nodes
    ────▶ WANTED ────────────────────▶ READY ──────────────▶ UNLOADING ────────────────────▶ (none)
                                       ▲   ▲
    load ▶ LOADING ── all nodes did ───┘   │ a node lists one that nobody knew
             └─────── one could not ▶ (none), and the others are told to unload it

Nodes are the truth. Each lists what it can serve, first after every Welcome, and again at each
change; so a router that was restarted, and a second router, know the adapters without a word
between routers. An adapter's identity is its digest. The first digest of a name counts for as long
as a node has it; who holds other content under that name is no candidate for it (`Node.holds`).

Who was to unload something and was lost before it answered still owes that. Should the same process
come back, it is told to unload, and teaches nobody what was unloaded here; also where the same was
loaded again since, for the first order may still lie there unread.

An adapter that nodes drop by themselves (their own HTTP, another router's unload) goes once no node
here lists it, and is not given back to them. One whose nodes merely died stays: the next node to
join is given it.
"""

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from common.messages import Adapter, AdapterInfo, Incarnation
from router.errors import ApiError, invalid, not_found

V = TypeVar("V")

REMEMBERED = 1024
"""Lost incarnations whose adapters and debts are remembered."""


class AdapterState(StrEnum):
    WANTED = "wanted"
    """The command line names it, and no node has read it yet: its digest is not known."""
    LOADING = "loading"
    """A load is under way on all nodes; no request may use it."""
    READY = "ready"
    UNLOADING = "unloading"
    """No new request may use it; those accepted before go on."""


@dataclass(slots=True, eq=False)
class Entry:
    """One adapter of the cluster. Written only by the catalogue."""

    name: str
    path: str
    state: AdapterState
    digest: str = ""
    pinned: bool = False
    wanted_from: str = ""
    """Path on the command line, if it is named there: a load that fails leaves it WANTED."""
    busy: bool = False
    """A verb is at work on it."""

    @property
    def adapter(self) -> Adapter:
        return Adapter(self.name, self.digest)


class AdapterCatalogue:
    """All adapters by name."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._listed: dict[Incarnation, dict[str, AdapterInfo]] = {}
        """What each linked node can serve, as it said last."""
        self._lost: OrderedDict[Incarnation, dict[str, Entry | None]] = OrderedDict()
        """What a node listed that is not linked now, and what the cluster had then of that name."""
        self._uncertain: OrderedDict[Incarnation, set[str]] = OrderedDict()
        """Names that a node was to load and was lost, or was late, before it answered."""
        self._owed: OrderedDict[Incarnation, set[str]] = OrderedDict()
        """Names that a node still has to unload."""
        self._dropped: OrderedDict[Incarnation, set[str]] = OrderedDict()
        """Names that somebody unloaded on that node: it is not given them again by itself."""
        self.mismatches = 0
        """Times that a node listed other content under a name of the cluster."""

    # ------------------------------------------------------------ what is asked

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def entries(self) -> list[Entry]:
        """By name."""
        return sorted(self._entries.values(), key=lambda entry: entry.name)

    def from_path(self, path: str) -> list[Entry]:
        """Those that were loaded from there."""
        return [entry for entry in self.entries() if entry.path == path]

    def paths(self) -> dict[str, str]:
        """Name to path of those that can be used."""
        return {e.name: e.path for e in self.entries() if e.state is AdapterState.READY}

    def serves(self, adapter: Adapter) -> bool:
        """Whether a new request may use it."""
        entry = self._entries.get(adapter.name)
        if entry is None or entry.state is not AdapterState.READY:
            return False
        return entry.digest == adapter.digest

    def expects(self, adapter: Adapter) -> bool:
        """Whether a request that was accepted with it may hope for a node that has it."""
        entry = self._entries.get(adapter.name)
        return entry is not None and entry.digest == adapter.digest

    def holders(self, name: str) -> list[Incarnation]:
        """Linked nodes that list this name, whatever the content."""
        return [node for node, listed in self._listed.items() if name in listed]

    def lacking(self, node: Incarnation) -> list[Entry]:
        """What a linked node should be given: what the cluster has and it neither holds nor had
        unloaded by somebody else."""
        listed = self._listed.get(node, {})
        dropped = self._dropped.get(node, set())
        owed = self._owed.get(node, set())
        return [
            entry
            for entry in self.entries()
            if entry.state in (AdapterState.WANTED, AdapterState.READY)
            and entry.name not in dropped
            and (entry.name not in listed or entry.name in owed)
        ]

    def debts(self, node: Incarnation) -> list[str]:
        """What a node has to unload before it is used."""
        return sorted(self._owed.get(node, ()))

    # ------------------------------------------------------------ verbs

    def want(self, name: str, path: str) -> None:
        """The command line names an adapter; the first node that joins will read it."""
        self._entries[name] = Entry(name, path, AdapterState.WANTED, wanted_from=path)

    def begin_load(self, name: str, path: str, *, pinned: bool) -> Entry:
        """A load begins. Ends with `loaded` or `give_up_load`.

        Raises:
            ApiError: 400 or 409, it is there already or under way.
        """
        entry = self._entries.get(name)
        if entry is not None and entry.state is not AdapterState.WANTED:
            raise _occupied(entry)
        wanted_from = entry.wanted_from if entry is not None else ""
        for dropped in self._dropped.values():
            dropped.discard(name)
        entry = Entry(name, path, AdapterState.LOADING, pinned=pinned, busy=True)
        entry.wanted_from = wanted_from
        self._entries[name] = entry
        return entry

    def loaded(self, entry: Entry, digest: str) -> None:
        """All nodes have it, or the first has read what the command line names."""
        if self._entries.get(entry.name) is entry:
            entry.state, entry.digest, entry.busy = AdapterState.READY, digest, False

    def give_up_load(self, entry: Entry) -> None:
        """It is not to be; whoever may have it owes an unload by now."""
        if entry.wanted_from:
            self.want(entry.name, entry.wanted_from)
        else:
            del self._entries[entry.name]

    def begin_unload(self, name: str) -> Entry:
        """From now on no new request may use it. Ends with `unloaded`, or with `suspend_unload`
        and is begun again later.

        Raises:
            ApiError: 404, it was never loaded; 409, it is being loaded or unloaded.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise not_found(f"adapter {name!r} was never loaded", "lora_name", "adapter_not_found")
        if entry.busy:
            raise _occupied(entry)
        entry.state, entry.busy = AdapterState.UNLOADING, True
        return entry

    def suspend_unload(self, entry: Entry) -> None:
        """It takes too long: nobody waits any more, but it stays as good as unloaded."""
        entry.busy = False

    def unloaded(self, entry: Entry) -> None:
        """All nodes here have let go; who had it and is away owes an unload."""
        del self._entries[entry.name]
        for remembered in (self._lost, self._uncertain):
            for node, names in remembered.items():
                if entry.name in names:
                    self.owe(node, entry.name)

    def note_uncertain(self, node: Incarnation, name: str) -> None:
        """A node was to load it, and nobody knows whether it does."""
        _of(self._uncertain, node).add(name)

    def owe(self, node: Incarnation, name: str) -> None:
        """A node may have what it must not have."""
        _of(self._owed, node).add(name)

    def settle_debt(self, node: Incarnation, name: str) -> None:
        """A node has answered an unload, or has by right what it owed."""
        owed = self._owed.get(node)
        if owed is not None:
            owed.discard(name)
            if not owed:
                del self._owed[node]

    # ------------------------------------------------------------ what nodes say

    def on_list(self, node: Incarnation, infos: Sequence[AdapterInfo]) -> list[Entry]:
        """A node's adapters. Returns entries that its first list has taught, which the others
        might lack."""
        listed = {info.name: info for info in infos}
        before = self._listed.get(node)
        self._listed[node] = listed
        if before is None:
            gone = self._gone_while_lost(node, listed)
            self._uncertain.pop(node, None)
        else:
            gone = set(before) - set(listed)
        taught = []
        for info in infos:
            self._dropped.get(node, set()).discard(info.name)
            news = before is None or before.get(info.name) != info
            if news and info.name not in self._owed.get(node, ()) and self._learn(info):
                taught.append(self._entries[info.name])
        for name in gone:
            if name not in self._owed.get(node, ()):
                _of(self._dropped, node).add(name)
            self._forget_if_gone(name)
        return taught if before is None else []

    def listed(self, node: Incarnation) -> tuple[AdapterInfo, ...] | None:
        """What a linked node said last; None before its first list."""
        listed = self._listed.get(node)
        return None if listed is None else tuple(listed.values())

    def on_loss(self, node: Incarnation) -> None:
        """A node's link ended; its next list is a first one."""
        listed = self._listed.pop(node, None)
        if listed is not None:
            self._lost[node] = {name: self._entries.get(name) for name in listed}
            _bound(self._lost)
            for name in listed:
                entry = self._entries.get(name)
                if entry is not None and not self._held(entry):
                    self._learn_other(name)

    def _gone_while_lost(self, node: Incarnation, listed: Container[str]) -> set[str]:
        """What somebody unloaded on a node while its link was down; not what was loaded anew since,
        which it could not hear of."""
        had = self._lost.pop(node, {})
        return {
            name
            for name, entry in had.items()
            if name not in listed and entry is not None and self._entries.get(name) is entry
        }

    def _learn(self, info: AdapterInfo) -> bool:
        """Take in what a node has. Whether the cluster has it only since now."""
        entry = self._entries.get(info.name)
        if entry is None:
            entry = Entry(info.name, info.path, AdapterState.READY, info.digest, info.pinned)
            self._entries[info.name] = entry
            return True
        match entry.state:
            case AdapterState.WANTED:
                entry.state, entry.digest = AdapterState.READY, info.digest
                return True
            case AdapterState.READY if entry.digest != info.digest:
                if self._held(entry):
                    self.mismatches += 1
                    return False
                entry.digest, entry.path, entry.pinned = info.digest, info.path, info.pinned
                return True
            case _:
                return False  # known, or a verb is at work and will decide

    def _forget_if_gone(self, name: str) -> None:
        """A node has dropped it: if it was the last, the cluster does not have it any more."""
        entry = self._entries.get(name)
        if entry is None or entry.busy or not entry.digest or self._held(entry):
            return
        if entry.state is AdapterState.UNLOADING:
            self.unloaded(entry)
            return
        del self._entries[name]
        self._learn_other(name)

    def _learn_other(self, name: str) -> None:
        """Nobody has the content that counted: what a node has under this name, which nobody could
        use until now, counts from now on."""
        for listed in self._listed.values():
            if name in listed:
                self._learn(listed[name])
                return

    def _held(self, entry: Entry) -> bool:
        """Whether a linked node has just this content."""
        return any(
            entry.name in listed and listed[entry.name].digest == entry.digest
            for listed in self._listed.values()
        )


def _of(names: OrderedDict[Incarnation, set[str]], node: Incarnation) -> set[str]:
    """The names noted for a node."""
    noted = names.setdefault(node, set())
    _bound(names)
    return noted


def _bound(remembered: OrderedDict[Incarnation, V]) -> None:
    while len(remembered) > REMEMBERED:
        remembered.popitem(last=False)


def _occupied(entry: Entry) -> ApiError:
    match entry.state:
        case AdapterState.LOADING:
            return ApiError(409, f"adapter {entry.name!r} is being loaded", code="adapter_loading")
        case AdapterState.UNLOADING:
            message = f"adapter {entry.name!r} is being unloaded"
            return ApiError(409, message, code="adapter_unloading")
        case _:
            message = f"adapter {entry.name!r} is already loaded from {entry.path!r}"
            return invalid(message, "lora_name", "already_loaded")
