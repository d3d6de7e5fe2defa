"""The fault matrix: who is struck, by what, and where the requests are at that moment.

One cell: 20 streams, of the base model and three adapters in turn, begin on two prefill and two
decode nodes, half of them through each of two routers, which together give the nodes more than they
have pages for. When the victim is *seen* holding requests in the cell's phase, the fault strikes.
Then all clients have their true end, the victim is back, idle nodes have every page, new requests
are right and no process holds more than before.
"""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

import aiohttp

from tests.faults.load import End, Load, Stream, Work
from tests.faults.phases import Phase, Watch
from tests.faults.resources import Baseline
from tests.integration.client import Client, client
from tests.integration.lora_rig import Wardrobe, load_all, make_wardrobe
from tests.integration.oracle import random_prompt
from tests.processes import Fleet, Member, plan_fleet
from tests.tiny_models import make_tiny_model

STREAMS = 20
STOPPED_S = 5.0
BACK_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 30.0
MODEL = {
    "hidden_size": 192, "intermediate_size": 640, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
"""So heavy that a chunk takes tens of milliseconds: a phase lasts until the fault has struck."""
NODE_FLAGS = {
    "num_pages": 72, "chunk_size": 64, "lease_s": 2, "longest_post_s": 0.5, "peer_timeout_s": 2,
}  # fmt: skip
"""Pools for about four requests, so that some wait for pages; short leases, so that pages of a dead
prefill node are home in seconds."""
TRUNK_TOKENS = 50
"""With which all prompts begin: three pages that are computed once and a part of one that is not
shared. Each cell begins with empty caches, and the rest of every prompt is its own."""

PATIENT = {"max_queue_s": 3600, "max_kv_oversubscription": 1000}
"""Flags of a router that refuses nobody, however slow the machine is."""


class Fault(StrEnum):
    KILL = "kill-9"
    """Gone until all streams have ended; then started again."""
    STOP = "stop-5s"
    TERM = "sigterm"
    """Asked to end, which it does with exit code 0; then started again."""
    RESTART = "restart"
    """Killed, and started again at once where it was."""


@dataclass(frozen=True, slots=True)
class Cell:
    role: str
    fault: Fault
    phase: Phase

    def __str__(self) -> str:
        return f"{self.role}-{self.fault}-{self.phase}"


CELLS = tuple(
    Cell(role, fault, phase)
    for fault in Fault
    for role in ("prefill", "decode", "router")
    for phase in Phase
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a cell that passed."""

    cell: Cell
    recovery_s: float
    """From the fault until every stream had gone on or ended, or a new request was answered."""
    seconds: float
    """The whole cell."""
    whole: int
    """Streams with their whole answer."""
    replays: int


class Arena:
    """Two prefill nodes, two decode nodes, two routers, a load, and what is normal for them."""

    def __init__(self, fleet: Fleet, wardrobe: Wardrobe) -> None:
        self.fleet = fleet
        self._wardrobe = wardrobe
        self.works: Sequence[Work] = ()
        self._baseline = Baseline()
        self._turn = 0

    @classmethod
    def prepare(cls, folder: Path) -> Self:
        """Make the model and its adapters; nothing is started yet."""
        model = make_tiny_model("llama", folder / "model", **MODEL)
        fleet = plan_fleet(
            model,
            folder,
            prefill=2,
            decode=2,
            routers=2,
            node_flags=NODE_FLAGS,
            router_flags=PATIENT,
        )
        return cls(fleet, make_wardrobe(model, folder / "adapters"))

    async def warm_up(self) -> None:
        """Load without a fault: its answers are the truth, and what everybody holds is normal.

        Transformers and peft confirm some of the answers, one of each adapter; `test_parity` and
        `test_lora_parity` are where they confirm all.
        """
        await self.fleet.ready()
        chance = random.Random(48)
        names = [None, *self._wardrobe.adapters]
        trunk = random_prompt(chance, TRUNK_TOKENS)
        asked = [
            (
                trunk + random_prompt(chance, chance.randint(100, 400) - TRUNK_TOKENS),
                chance.randint(30, 60),
                names[number // 2 % len(names)],  # through each router
            )
            for number in range(STREAMS)
        ]
        async with client(self.fleet.url) as session:
            await load_all(session, self._wardrobe)
            answers = await asyncio.gather(*(session.tokens(p, n, who) for p, n, who in asked))
        self.works = [
            Work(prompt, answer, who)
            for (prompt, _, who), answer in zip(asked, answers, strict=True)
        ]
        for work in self.works[: 2 * len(names) : 2]:
            wanted = self._wardrobe.answer(work.prompt, len(work.answer), work.adapter)
            assert work.answer == wanted, work.adapter
        for _ in range(2):
            async with Load(self.fleet.urls, self.works) as load:
                await load.finish()
            _judge(load.streams, must_be_whole=True)
            await self.wait_idle()
            await self._baseline.widen(self.fleet)

    async def run(self, cell: Cell) -> Outcome:
        """Raises AssertionError with all that is wrong."""
        began = time.monotonic()
        await self.wait_idle()
        await self._flush()
        victim = self._victim(cell.role)
        before = await self._replays()
        async with Load(self.fleet.urls, self.works) as load:
            struck = await self._strike(cell, victim)
            answered = await self._after(cell, victim, load)
        lost = [stream for stream in load.streams if stream.url == victim.url]
        kept = [stream for stream in load.streams if stream.url != victim.url]
        # Nobody but the router knows its requests; if it is not killed, it finishes them.
        whole = _judge(lost, must_be_whole=cell.fault in (Fault.STOP, Fault.TERM))
        whole += _judge(kept, must_be_whole=True)
        gone_on = load.went_on_after(struck) if answered is None else answered - struck
        await self.fleet.ready(BACK_TIMEOUT_S)
        await self._serves_right()
        await self.wait_idle()
        grown = await self._baseline.settle(self.fleet)
        if grown:
            await self._baseline.widen(self.fleet)  # the next cell is judged by itself
            raise AssertionError("more than before: " + "; ".join(grown))
        after = await self._replays()
        replays = sum(count - before[url] for url, count in after.items() if url != victim.url)
        return Outcome(cell, gone_on, time.monotonic() - began, whole, replays)

    async def mend(self) -> None:
        """After a cell that failed: everybody runs, so that the next one can be judged."""
        for member in self.fleet.members.values():
            member.signal(signal.SIGCONT)
            if not member.is_alive:
                member.start()
        await self.fleet.ready(BACK_TIMEOUT_S)

    def _victim(self, role: str) -> Member:
        """Each of a role in turn."""
        self._turn += 1
        same = [member for member in self.fleet.members.values() if member.role == role]
        return same[self._turn % len(same)]

    # ------------------------------------------------------------ the fault

    async def _strike(self, cell: Cell, victim: Member) -> float:
        """Wait for the phase, then hit; when it was."""
        number = {
            Fault.KILL: signal.SIGKILL,
            Fault.RESTART: signal.SIGKILL,
            Fault.STOP: signal.SIGSTOP,
            Fault.TERM: signal.SIGTERM,
        }[cell.fault]
        async with aiohttp.ClientSession() as session:
            await Watch(session, self.fleet.nodes).until(cell.phase, victim)
            victim.signal(number)
            return time.monotonic()

    async def _after(self, cell: Cell, victim: Member, load: Load) -> float | None:
        """See the fault through to the end of all streams.

        Returns when a new request was answered, if the router was away; else None.
        """
        answered = None
        match cell.fault:
            case Fault.STOP:
                await asyncio.sleep(STOPPED_S)
                victim.signal(signal.SIGCONT)
            case Fault.RESTART:
                victim.kill()
                victim.start()
            case Fault.TERM:
                # Its requests may have to end first, so this is no delay that has to be short.
                code = await victim.ended()
                assert code == 0, f"{victim.name} ended with {code}\n{victim.log_end()}"
            case Fault.KILL:
                victim.kill()
        if cell.role == "router" and cell.fault is not Fault.STOP:
            if not victim.is_alive:
                victim.start()
            answered = await self._first_answer(victim)
        await load.finish()
        if not victim.is_alive:
            victim.start()
        return answered

    async def _first_answer(self, router: Member) -> float:
        """When a request through the router was right again; asked anew until then."""
        deadline = time.monotonic() + BACK_TIMEOUT_S
        problem: object = None
        while time.monotonic() < deadline:
            async with Load([router.url], self.works[:1]) as one:
                await one.finish()
            if one.streams[0].is_right:
                return time.monotonic()
            problem = one.streams[0].describe()
            await asyncio.sleep(0.05)
        raise AssertionError(f"no request was served any more: {problem}")

    # ------------------------------------------------------------ afterwards

    async def _serves_right(self) -> None:
        """New requests through both routers, enough for every pair of nodes to have some."""
        async with Load(self.fleet.urls, self.works[:8]) as load:
            await load.finish()
        _judge(load.streams, must_be_whole=True)

    async def wait_idle(self) -> None:
        """All queues empty, all pages free or cached, on every node."""
        async with client(self.fleet.url) as session:
            await session.wait_idle(IDLE_TIMEOUT_S)

    async def _flush(self) -> None:
        async with client(self.fleet.url) as session:
            status, answer = await session.post("/flush_cache")
            assert status == 200, answer

    async def _replays(self) -> dict[str, int]:
        """How many there were so far, by router."""
        counts = {}
        for url in self.fleet.urls:
            async with client(url) as session:
                counts[url] = sum((await replays(session)).values())
        return counts


async def replays(session: Client) -> dict[str, int]:
    """How many attempts were followed by another so far, by cause."""
    return await counts(session, "replays")


async def paths(session: Client) -> dict[str, int]:
    """How many attempts began on a pair of nodes, and on a decode node alone."""
    return await counts(session, "attempts")


async def counts(session: Client, name: str) -> dict[str, int]:
    """A router's counter by its one label."""
    _, text = await session.get("/metrics")
    found = {}
    for line in text.splitlines():
        shown, _, value = line.rpartition(" ")
        if shown.startswith(f"pdserve_router_{name}_total{{"):
            found[shown.split('"')[1]] = int(float(value))
    return found


def _judge(streams: Sequence[Stream], *, must_be_whole: bool) -> int:
    """Every client had its true end; returns how many had their whole answer."""
    bad = [s for s in streams if not (s.is_right if must_be_whole else s.ended_truly)]
    lines = "\n".join(stream.describe() for stream in bad)
    assert not bad, f"{len(bad)} of {len(streams)} streams:\n{lines}"
    assert all(stream.end is not End.HUNG for stream in streams)
    return sum(stream.is_right for stream in streams)
