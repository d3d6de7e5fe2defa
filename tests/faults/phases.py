"""Where requests are at this moment, as the nodes themselves say: a fault strikes in a known phase.

The queues of a node's `/server_info` are those of its last finished turn. What a victim holds:

                    prefill node      decode node                      router (some node)
    bootstrapping   bootstrap         prealloc                         bootstrap or prealloc
    prefilling      prefilling        transfer, and a prefill node     prefilling
                                      computes
    transferring    inflight          transfer, and a prefill node     inflight
                                      has writes under way
    decoding        none any more: a  running                          running
                    decode node runs
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum

import aiohttp

from tests.processes import Member

WATCH_TIMEOUT_S = 30.0

Queues = Mapping[str, int]


class Phase(StrEnum):
    BOOTSTRAPPING = "bootstrapping"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"


def in_phase(phase: Phase, role: str, own: Queues, prefills: Queues, decodes: Queues) -> bool:
    """Whether a victim of `role` with queues `own` has requests in `phase`.

    `prefills` and `decodes` are the sums over all nodes of a role; `own` is empty for a router.
    """
    match phase, role:
        case Phase.BOOTSTRAPPING, "prefill":
            return own["bootstrap"] > 0
        case Phase.BOOTSTRAPPING, "decode":
            return own["prealloc"] > 0
        case Phase.BOOTSTRAPPING, _:
            return prefills["bootstrap"] + decodes["prealloc"] > 0
        case Phase.PREFILLING, "prefill":
            return own["prefilling"] > 0
        case Phase.PREFILLING, "decode":
            return own["transfer"] > 0 and prefills["prefilling"] > 0
        case Phase.PREFILLING, _:
            return prefills["prefilling"] > 0
        case Phase.TRANSFERRING, "prefill":
            return own["inflight"] > 0
        case Phase.TRANSFERRING, "decode":
            return own["transfer"] > 0 and prefills["inflight"] > 0
        case Phase.TRANSFERRING, _:
            return prefills["inflight"] > 0
        case Phase.DECODING, "decode":
            return own["running"] > 0
        case _:
            return decodes["running"] > 0


class Watch:
    """Looks at the nodes' queues, all at once and as often as they answer."""

    def __init__(self, session: aiohttp.ClientSession, nodes: Sequence[Member]) -> None:
        self._session = session
        self._nodes = nodes
        self.seen: dict[str, Queues] = {}
        """The newest look, by node."""

    async def until(self, phase: Phase, victim: Member) -> None:
        """Return the moment `victim` is seen in `phase`.

        Raises:
            AssertionError: it never was.
        """
        deadline = time.monotonic() + WATCH_TIMEOUT_S
        looks = 0
        while time.monotonic() < deadline:
            await self.look()
            looks += 1
            if self._has(phase, victim):
                return
        raise AssertionError(f"{victim.name} was never {phase} in {looks} looks: {self.seen}")

    def _has(self, phase: Phase, victim: Member) -> bool:
        sums = {"prefill": _Sum(), "decode": _Sum()}
        for node in self._nodes:
            sums[node.role].add(self.seen[node.name])
        own = self.seen.get(victim.name, {})
        return in_phase(phase, victim.role, own, sums["prefill"], sums["decode"])

    async def look(self) -> None:
        """Ask every node once."""
        looks = await asyncio.gather(*(self._queues(node) for node in self._nodes))
        self.seen = {node.name: queues for node, queues in zip(self._nodes, looks, strict=True)}

    async def _queues(self, node: Member) -> Queues:
        async with self._session.get(node.url + "/server_info") as response:
            info = await response.json()
        # Before its first turn a node has no queues to speak of.
        return _Sum(info["stats"].get("queues", {}))


class _Sum(dict[str, int]):
    """Queue lengths; what is not named is empty."""

    def __missing__(self, _: str) -> int:
        return 0

    def add(self, queues: Queues) -> None:
        for name, length in queues.items():
            self[name] += length
