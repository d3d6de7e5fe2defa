"""Loads and unloads adapters on all nodes, and gives each node that joins what it lacks.

    load     every node at once; all must come to the same digest, else those that did are told to
             unload. A node that is lost meanwhile does not count, one that joins is given it.
    unload   at once no new request; this router's unfinished ones end; then every node lets go.
    join     a node takes no work before its list has come and it was given what it lacks.

What was begun goes on when the client that asked hangs up. Everything a node is told of a name
travels one link in order, so an unload behind a load that is late undoes it, whenever that ends.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from common.messages import AdapterInfo, LoadAdapter, NodeState, UnloadAdapter
from router.adapters import AdapterCatalogue, AdapterState, Entry
from router.admin import AdminDesk, NodeAnswer
from router.errors import ApiError, unavailable
from router.jobs import JobTable
from router.node import Node
from router.nodes import NodeRegistry
from router.requests import Job

log = logging.getLogger("router.adapters")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """See `RouterConfig`."""

    load_timeout_s: float = 300.0
    unload_timeout_s: float = 600.0
    roll_back_s: float = 30.0
    """How long a load that failed waits for what it undoes; that goes on by itself then."""


class AdapterVerbs:
    """Use from the event loop's thread. `dispatch`: a node may have become ready."""

    def __init__(
        self,
        catalogue: AdapterCatalogue,
        registry: NodeRegistry,
        jobs: JobTable,
        desk: AdminDesk,
        limits: AdapterLimits,
        dispatch: Callable[[], None],
    ) -> None:
        self._catalogue = catalogue
        self._registry = registry
        self._jobs = jobs
        self._desk = desk
        self._limits = limits
        self._dispatch = dispatch
        self._tasks: set[asyncio.Task[Any]] = set()
        self._first_reads: dict[str, asyncio.Lock] = {}
        """Of adapters that the command line names: one node reads first, for the digest."""
        self._unused: dict[str, asyncio.Event] = {}
        """Set when the last job of an adapter that is being unloaded has ended."""
        self.loads: Counter[str] = Counter()
        """By outcome; what joining nodes were given counts as well."""
        self.unloads: Counter[str] = Counter()

    # ------------------------------------------------------------ verbs

    async def load(self, name: str, path: str, *, pinned: bool) -> list[NodeAnswer]:
        """Load on all nodes or on none.

        Raises:
            ApiError: 400 it is there, or a node refuses; 409 it is on its way; 503 no node.
        """
        first_read = self._first_reads.get(name)
        if first_read is not None and first_read.locked():
            message = f"adapter {name!r} is being loaded"
            raise ApiError(409, message, code="adapter_loading")
        entry = self._catalogue.begin_load(name, path, pinned=pinned)
        return await self._go_on(self._counted(self.loads, self._load(entry)))

    async def unload(self, name: str) -> list[NodeAnswer]:
        """Refuse new requests at once, wait for those there are, then unload on all nodes.

        Raises:
            ApiError: 404 it is not there; 409 it is on its way; 503 it takes too long, and may be
                asked for again.
        """
        entry = self._catalogue.begin_unload(name)
        return await self._go_on(self._counted(self.unloads, self._unload(entry)))

    async def close(self, timeout_s: float) -> None:
        """Wait a little for what is under way, then cut it off; a load is undone."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ what happens

    def on_list(self, node: Node, infos: Sequence[AdapterInfo]) -> None:
        """A node has said which adapters it can serve."""
        joined = self._catalogue.listed(node.incarnation) is None
        taught = self._catalogue.on_list(node.incarnation, infos)
        if joined and node.state is not NodeState.DRAINING and self._wants(node):
            node.syncing = True
            self._start(self._sync(node))
        for entry in taught:
            for other in self._registry.all():
                if other is not node and self._lacks(other, entry):
                    self._start(self._give(other, entry))

    def on_ended(self, job: Job) -> None:
        """A job ended: perhaps the last that an unload waits for."""
        if job.adapter is not None:
            unused = self._unused.get(job.adapter.name)
            if unused is not None and not self._jobs.of_adapter(job.adapter.name):
                unused.set()

    # ------------------------------------------------------------ load

    async def _load(self, entry: Entry) -> list[NodeAnswer]:
        asked = [node for node in self._registry.all() if _may_load(node)]
        answers: list[NodeAnswer] = []
        try:
            if not asked:
                raise unavailable(f"adapter {entry.name!r}: there is no node to load it on")
            verb = LoadAdapter(name=entry.name, path=entry.path, pinned=entry.pinned)
            answers = await self._desk.carry_out(asked, verb, self._limits.load_timeout_s)
            digest = _agreed(entry, answers)
        except ApiError:
            await self._roll_back(entry, asked, answers)
            raise
        except asyncio.CancelledError:
            self._desk.tell([n for n in asked if self._is_here(n)], UnloadAdapter(entry.name))
            self._catalogue.give_up_load(entry)
            raise
        self._catalogue.loaded(entry, digest)
        for answer in answers:
            self._note_load(answer, entry)
        log.info("loaded adapter %r (%.12s) from %s", entry.name, digest, entry.path)
        late = [node for node in self._registry.all() if self._lacks(node, entry)]
        given = await asyncio.gather(*(self._give(node, entry) for node in late))
        return [*answers, *(answer for answer in given if answer is not None)]

    async def _roll_back(
        self, entry: Entry, asked: Sequence[Node], answers: Sequence[NodeAnswer]
    ) -> None:
        """Undo on all that have it or may come to have it; waits for those that have."""
        may_have = {a.incarnation for a in answers if a.ok or a.late or a.lost}
        have = {a.incarnation for a in answers if a.ok}
        for incarnation in may_have:
            self._catalogue.owe(incarnation, entry.name)
        suspects = [n for n in asked if n.incarnation in may_have and self._is_here(n)]
        undone = [
            self._start(self._collect(node, entry.name))
            for node in suspects
            if node.incarnation in have
        ]
        for node in suspects:
            if node.incarnation not in have:
                self._start(self._collect(node, entry.name))
        try:
            if undone:
                await asyncio.wait(undone, timeout=self._limits.roll_back_s)
        finally:
            self._catalogue.give_up_load(entry)

    # ------------------------------------------------------------ unload

    async def _unload(self, entry: Entry) -> list[NodeAnswer]:
        clock = asyncio.get_running_loop().time
        ends = clock() + self._limits.unload_timeout_s
        try:
            await self._until_unused(entry.name, self._limits.unload_timeout_s)
            answers: list[NodeAnswer] = []
            asked: set[Node] = set()
            while nodes := self._to_ask(entry, asked):
                asked.update(nodes)  # who joins meanwhile is asked in the next round
                left_s = ends - clock()
                if left_s <= 0:
                    raise unavailable(f"adapter {entry.name!r} comes back again", "adapter_in_use")
                answers += await self._desk.carry_out(nodes, UnloadAdapter(entry.name), left_s)
                self._check_gone(entry, answers)
        except BaseException:
            self._catalogue.suspend_unload(entry)
            raise
        for answer in answers:
            if not answer.lost:
                self._catalogue.settle_debt(answer.incarnation, entry.name)
        if self._catalogue.get(entry.name) is entry:
            self._catalogue.unloaded(entry)
        log.info("unloaded adapter %r", entry.name)
        return answers

    def _to_ask(self, entry: Entry, asked: Container[Node]) -> list[Node]:
        """Linked nodes that were not told to unload yet, or were given it anew since."""
        holders = self._catalogue.holders(entry.name)
        linked = [node for node in self._registry.all() if node.linked]
        return [n for n in linked if n not in asked or n.incarnation in holders]

    async def _until_unused(self, name: str, timeout_s: float) -> None:
        """Wait for this router's jobs of an adapter. Raises ApiError."""
        if not self._jobs.of_adapter(name):
            return
        unused = self._unused[name] = asyncio.Event()
        try:
            await asyncio.wait_for(unused.wait(), timeout_s)
        except TimeoutError:
            count = self._jobs.of_adapter(name)
            message = f"adapter {name!r} takes no new requests, but {count} are still running"
            raise unavailable(f"{message}; unload it again to wait", "adapter_in_use") from None
        finally:
            del self._unused[name]

    def _check_gone(self, entry: Entry, answers: Sequence[NodeAnswer]) -> None:
        """Raises ApiError where a node has not let go: it says why, or says nothing."""
        stuck = [
            f"{answer.name}: {answer.message}"
            for answer in answers
            if answer.late or (not answer.ok and not answer.lost and self._still_has(answer, entry))
        ]
        if stuck:
            message = f"adapter {entry.name!r} is not unloaded everywhere: " + "; ".join(stuck)
            raise unavailable(message, "adapter_in_use")

    def _still_has(self, answer: NodeAnswer, entry: Entry) -> bool:
        return answer.incarnation in self._catalogue.holders(entry.name)

    # ------------------------------------------------------------ nodes that join

    def _wants(self, node: Node) -> bool:
        incarnation = node.incarnation
        return bool(self._catalogue.debts(incarnation) or self._catalogue.lacking(incarnation))

    def _lacks(self, node: Node, entry: Entry) -> bool:
        """Whether a node that has told what it has should be given an adapter."""
        listed = self._catalogue.listed(node.incarnation) is not None
        return listed and _may_load(node) and entry in self._catalogue.lacking(node.incarnation)

    async def _sync(self, node: Node) -> None:
        """Give a node that has joined what the cluster has; it takes no work until then."""
        incarnation = node.incarnation
        debts = self._catalogue.debts(incarnation)
        work: list[Coroutine[Any, Any, Any]] = [self._exchange(node, name) for name in debts]
        lacking = self._catalogue.lacking(incarnation)
        work += [self._give(node, entry) for entry in lacking if entry.name not in debts]
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*work), self._limits.load_timeout_s)
        finally:
            node.syncing = False
            self._dispatch()

    async def _exchange(self, node: Node, name: str) -> None:
        """Have it unload what it owes, and only then load what the cluster has of that name."""
        await self._collect(node, name)
        entry = self._catalogue.get(name)
        if entry is not None and self._lacks(node, entry):
            await self._give(node, entry)

    async def _give(self, node: Node, entry: Entry) -> NodeAnswer | None:
        """Have one node load an adapter of the cluster. None if that is no longer wanted."""
        if entry.state is AdapterState.WANTED:
            async with self._first_reads.setdefault(entry.name, asyncio.Lock()):
                if entry.state is AdapterState.WANTED:
                    return await self._hand_over(node, entry)
        return await self._hand_over(node, entry)

    async def _hand_over(self, node: Node, entry: Entry) -> NodeAnswer | None:
        usable = entry.state in (AdapterState.WANTED, AdapterState.READY)
        known = self._catalogue.get(entry.name) is entry
        if not (usable and known and self._is_here(node)):
            return None
        verb = LoadAdapter(
            name=entry.name, path=entry.path, pinned=entry.pinned, digest=entry.digest
        )
        (answer,) = await self._desk.carry_out([node], verb, self._limits.load_timeout_s)
        self._note_load(answer, entry)
        if not answer.ok:
            self.loads["not_given"] += 1
            log.warning("%s has no adapter %r: %s", answer.name, entry.name, answer.message)
            return answer
        self.loads["given"] += 1
        if not entry.digest:
            self._catalogue.loaded(entry, answer.digest)
        return answer

    async def _collect(self, node: Node, name: str) -> None:
        """Have a node unload what it owes."""
        verb = UnloadAdapter(name)
        (answer,) = await self._desk.carry_out([node], verb, self._limits.unload_timeout_s)
        answered = not (answer.lost or answer.late)
        if answer.ok or (answered and name not in (node.adapters or {})):
            self._catalogue.settle_debt(node.incarnation, name)
        elif answered:
            log.warning("%s keeps adapter %r: %s", answer.name, name, answer.message)

    # ------------------------------------------------------------ small things

    def _note_load(self, answer: NodeAnswer, entry: Entry) -> None:
        """What is known now of a node that was to load an adapter which stays."""
        if answer.ok:
            self._catalogue.settle_debt(answer.incarnation, entry.name)
        elif answer.lost or answer.late:
            self._catalogue.note_uncertain(answer.incarnation, entry.name)

    def _is_here(self, node: Node) -> bool:
        """Whether it is still linked by the same link."""
        return node.linked and self._registry.get(node.incarnation) is node

    async def _counted(self, outcomes: Counter[str], work: Coroutine[Any, Any, T]) -> T:
        try:
            done = await work
        except ApiError as error:
            outcomes["refused" if error.status == 400 else "failed"] += 1
            log.warning("%s", error.message)
            raise
        outcomes["done"] += 1
        return done

    async def _go_on(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that does not end when this waiting is cut off."""
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ApiError):
            log.error("work on adapters failed", exc_info=error)


def _may_load(node: Node) -> bool:
    return node.linked and node.state is not NodeState.DRAINING


def _agreed(entry: Entry, answers: Sequence[NodeAnswer]) -> str:
    """The digest that all nodes have come to; who was lost does not count. Raises ApiError."""
    refused = [f"{a.name}: {a.message}" for a in answers if not a.ok and not a.lost]
    what = f"adapter {entry.name!r} is loaded on no node"
    if refused:
        message = f"{what}: " + "; ".join(refused)
        if all(a.ok or a.lost or a.late for a in answers):
            raise unavailable(message, "adapter_timeout")
        raise ApiError(400, message, param="lora_path", code="adapter_refused")
    digests = {answer.digest for answer in answers if answer.ok}
    if not digests:
        raise unavailable(f"{what}: all that were asked were lost")
    if len(digests) > 1:
        found = "; ".join(f"{a.name} read {a.digest[:12]}" for a in answers if a.ok)
        message = f"{what}: incompatible: its content differs between nodes: {found}"
        raise ApiError(400, message, param="lora_path", code="adapter_differs")
    return digests.pop()
