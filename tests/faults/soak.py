"""A soak: clients ask for known answers without end, while random faults strike one after another.

Clients stream, wait, go away or abort their own request, of the base model or an adapter. One
adapter comes and goes. The fault maker kills, stops, ends and
pauses one process at a time, sees it back, rests, and goes on; who starts a process again is here
what a supervisor would be. Every answer is compared with transformers'. The first node of each role
is stopped and paused like all others but never ended: it sees all its peers come and go, and shows
whether memory stays flat.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp

from tests.faults.load import End, Stream, Work, follow
from tests.faults.matrix import paths, replays
from tests.faults.memory import MemoryWatch
from tests.integration.client import Client, client
from tests.integration.lora_rig import GUEST, in_use, try_load, try_unload
from tests.processes import Fleet, Member

ERRORS_SHOWN = 10
IDLE_TIMEOUT_S = 60.0
BACK_TIMEOUT_S = 90.0
LONGEST_VISIT_S = 6.0
"""Between a load and an unload of the adapter that comes and goes."""
PAUSE_MODES = ("abort", "retract", "in_place")


class Kind(StrEnum):
    """What may happen; the value names it in reports."""

    KILL = "kill -9"
    STOP = "stop"
    TERM = "sigterm"
    PAUSE = "pause"
    ROUTER = "router kill -9"


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    seconds: float
    seed: int
    clients: int = 12
    longest_rest_s: float = 5.0
    """Between a fault that is over and the next."""
    router_dies: bool = False
    """Kill the router too; its clients then have errors that are nobody's fault."""


@dataclass(slots=True)
class Tally:
    """What the clients saw and what was done to the cluster."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Streams whose tokens are not a beginning of the answer, or that claim to be whole."""
    hung: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Requests that nobody aborted and that did not get their whole answer."""
    faults: Counter[str] = field(default_factory=Counter)
    flushes: int = 0
    """Times that all caches were emptied."""
    verbs: Counter[str] = field(default_factory=Counter)
    """Loads and unloads that were answered."""
    refusals: list[str] = field(default_factory=list)
    """Loads and unloads that failed."""

    @property
    def requests(self) -> int:
        return self.ends.total()

    def judge(self, stream: Stream, *, may_be_aborted: bool) -> None:
        assert stream.end is not None
        self.ends[stream.end.value] += 1
        if stream.end is End.HUNG:
            self.hung.append(stream.describe())
        elif not stream.is_prefix or stream.ends > 1 or stream.claims_too_much:
            self.wrong.append(stream.describe())
        elif stream.work.adapter == GUEST and stream.error.startswith("404"):
            self.verbs["requests while it was away"] += 1
        elif stream.end in (End.ERROR, End.CUT) or (
            stream.end is End.ABORTED and not may_be_aborted
        ):
            self.errors.append(stream.describe())


@dataclass(frozen=True, slots=True)
class SoakReport:
    tally: Tally
    leaked_pages: dict[str, int]
    """By node, once everything has ended."""
    adapters_in_use: dict[str, int]
    """Adapter -> requests that nodes still count then."""
    replays: dict[str, int]
    paths: dict[str, int]
    """Attempts by the way they took."""
    memory: MemoryWatch

    def problems(self) -> list[str]:
        """Everything that must not be; empty for a passed soak."""
        found = [f"wrong: {line}" for line in self.tally.wrong]
        found += [f"hung: {line}" for line in self.tally.hung]
        found += [f"{name} leaked {n} pages" for name, n in self.leaked_pages.items() if n]
        found += [f"{name} still has {n} users" for name, n in self.adapters_in_use.items()]
        found += self.tally.refusals
        return found

    def lines(self) -> list[str]:
        """The report, for a person."""
        tally = self.tally
        return [
            f"requests {tally.requests}: " + _counts(tally.ends),
            f"wrong texts {len(tally.wrong)}, hung {len(tally.hung)}, "
            f"leaked pages {sum(self.leaked_pages.values())}, "
            f"ended with an error {len(tally.errors)}",
            f"faults: {_counts(tally.faults)}; caches emptied {tally.flushes} times",
            "an adapter that came and went: " + _counts(tally.verbs),
            "replays: " + _counts(self.replays),
            "attempts: " + _counts(self.paths),
            *self.memory.lines(),
            *(f"error: {line}" for line in tally.errors[:ERRORS_SHOWN]),
            *self.problems(),
        ]


def _counts(counts: Any) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


class Soak:
    """One run over a fleet that is ready."""

    def __init__(
        self, fleet: Fleet, works: Sequence[Work], guest: Path, settings: SoakSettings
    ) -> None:
        """`guest`: the adapter that some of `works` are for and that comes and goes; all others
        are loaded."""
        self._fleet = fleet
        self._guest = guest
        self._works = works
        self._settings = settings
        self._chance = random.Random(settings.seed)
        self._tally = Tally()
        self._aborting = False
        """A pause that aborts everything is in force, or was while requests still ran."""
        self._replays: Counter[str] = Counter()
        self._paths: Counter[str] = Counter()

    async def run(self) -> SoakReport:
        """Until the time is over and everything is quiet again."""
        until = time.monotonic() + self._settings.seconds
        memory = MemoryWatch(self._fleet)
        watching = asyncio.create_task(memory.watch())
        timeout = aiohttp.ClientTimeout(total=90)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(self._settings.clients):
                chance = random.Random(f"{self._settings.seed} {number}")
                tasks.create_task(self._ask_until(until, session, chance))
            tasks.create_task(self._break_until(until))
            tasks.create_task(self._come_and_go_until(until))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        leaked = await self._leaked()
        await self._note_counts()
        async with client(self._fleet.url) as session:
            users = await in_use(session)
        replayed, attempts = dict(self._replays), dict(self._paths)
        return SoakReport(self._tally, leaked, users, replayed, attempts, memory)

    # ------------------------------------------------------------ clients

    async def _ask_until(
        self, until: float, session: aiohttp.ClientSession, chance: random.Random
    ) -> None:
        while time.monotonic() < until:
            rid = f"soak-{chance.getrandbits(64):016x}"
            stream = Stream(chance.choice(self._works), chance.choice(self._fleet.urls), rid)
            aborted_before = self._tally.faults["pause abort"]
            asking = asyncio.create_task(follow(session, stream))
            drawn = chance.random()
            own_abort = False
            if drawn < 0.15:
                await self._after_some(stream, chance)
                asking.cancel()
            elif drawn < 0.25:
                await self._after_some(stream, chance)
                own_abort = True
                await self._abort(session, stream)
            await asyncio.wait({asking})
            if not asking.cancelled():
                asking.result()
            elif stream.end is None:  # it left before it had asked
                stream.close(End.LEFT)
            paused = self._aborting or self._tally.faults["pause abort"] > aborted_before
            self._tally.judge(stream, may_be_aborted=own_abort or paused)
            if stream.end in (End.ERROR, End.CUT):
                await asyncio.sleep(0.2)  # as a client would before it asks again

    @staticmethod
    async def _after_some(stream: Stream, chance: random.Random) -> None:
        """A random moment of the request's life: at once, after a time, or after some tokens."""
        tokens = chance.choice([0, 0, 1, len(stream.work.answer) // 2])
        deadline = time.monotonic() + chance.uniform(0, 3)
        while stream.end is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            if tokens and len(stream.tokens) >= tokens:
                return

    async def _abort(self, session: aiohttp.ClientSession, stream: Stream) -> None:
        body = {"rid": stream.rid}
        try:
            async with session.post(stream.url + "/abort_request", json=body) as response:
                await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return  # the router is away; its requests have ended with it

    async def _come_and_go_until(self, until: float) -> None:
        """Load the guest and unload it, over and over; it is away in the end."""
        chance = random.Random(f"{self._settings.seed} guest")
        while time.monotonic() < until:
            await asyncio.sleep(chance.uniform(0, LONGEST_VISIT_S))
            await self._verb("load", lambda c: try_load(c, GUEST, self._guest))
            await asyncio.sleep(chance.uniform(0, LONGEST_VISIT_S))
            await self._verb("unload", lambda c: try_unload(c, GUEST))

    async def _verb(self, what: str, ask: Callable[[Client], Awaitable[tuple[int, Any]]]) -> None:
        """It must be done, whatever happens to nodes meanwhile; a dead router may forget it."""
        began = time.monotonic()
        try:
            async with client(self._fleet.url) as session:
                status, answer = await ask(session)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            status, answer = 0, repr(error)
        self._tally.verbs[what] += status == 200
        if status != 200 and not self._settings.router_dies:
            took = time.monotonic() - began
            self._tally.refusals.append(f"{what} after {took:.1f} s: {status} {answer}")

    # ------------------------------------------------------------ faults

    async def _break_until(self, until: float) -> None:
        kinds = [Kind.KILL, Kind.STOP, Kind.TERM, Kind.PAUSE]
        if self._settings.router_dies:
            kinds.append(Kind.ROUTER)
        while time.monotonic() < until:
            await asyncio.sleep(self._chance.uniform(0.5, self._settings.longest_rest_s))
            await self._strike(self._chance.choice(kinds))
            await self._fleet.ready(BACK_TIMEOUT_S)

    async def _strike(self, kind: Kind) -> None:
        """One fault, from beginning to end; the process is started again if it is gone."""
        nodes = self._fleet.nodes
        if kind in (Kind.KILL, Kind.TERM):
            nodes = [node for node in nodes if not node.name.endswith("-0")]
        victim = self._chance.choice(nodes)
        match kind:
            case Kind.PAUSE:
                await self._pause()
                return
            case Kind.STOP:
                victim.signal(signal.SIGSTOP)
                await asyncio.sleep(self._chance.uniform(1, 8))
                victim.signal(signal.SIGCONT)
            case Kind.TERM:
                victim.signal(signal.SIGTERM)
                code = await victim.ended()
                assert code == 0, f"{victim.name} ended with {code}"
                victim.start()
            case Kind.KILL:
                await self._kill(victim)
            case Kind.ROUTER:
                victim = self._fleet.routers[0]
                await self._note_counts()
                await self._kill(victim)
        self._tally.faults[f"{kind.value} {victim.role}"] += 1

    async def _kill(self, victim: Member) -> None:
        victim.kill()
        await asyncio.sleep(self._chance.uniform(0, 2))
        victim.start()

    async def _pause(self) -> None:
        """The cluster or one node, in any mode, and on again."""
        mode = self._chance.choice(PAUSE_MODES)
        node = self._chance.choice([None, *self._fleet.nodes])
        name = None if node is None else node.name
        self._aborting = mode == "abort"
        self._tally.faults[f"pause {mode}"] += 1
        async with client(self._fleet.url) as session:
            await _done(session, "/pause_generation", {"mode": mode, "node": name})
            await self._flush_for(session, self._chance.uniform(0.2, 3))
            await _done(session, "/continue_generation", {"node": name})
        self._aborting = False

    async def _flush_for(self, session: Client, seconds: float) -> None:
        """Try to empty all caches; nodes refuse while their requests hold pages."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            status, _ = await session.post("/flush_cache")
            self._tally.flushes += status == 200
            await asyncio.sleep(0.2)

    # ------------------------------------------------------------ the end

    async def _leaked(self) -> dict[str, int]:
        """Pages that no request may be given once every queue is empty, by node."""
        async with client(self._fleet.url) as session:
            deadline = time.monotonic() + IDLE_TIMEOUT_S
            while not await session.all_idle() and time.monotonic() < deadline:
                await asyncio.sleep(0.2)
            infos = [await session.node_info(node) for node in await session.nodes()]
        return {info["name"]: _missing(info["stats"]) for info in infos}

    async def _note_counts(self) -> None:
        """Those of the router, which end with it."""
        async with client(self._fleet.url) as session:
            self._replays.update(await replays(session))
            self._paths.update(await paths(session))


def _missing(stats: dict[str, Any]) -> int:
    missing: int = stats["num_pages"] - stats.get("free_pages", 0)
    return missing


async def _done(session: Client, path: str, body: dict[str, Any]) -> None:
    status, answer = await session.post(path, body)
    assert status == 200, answer
