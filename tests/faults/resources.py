"""Whether processes hold more of the machine than they used to."""

import asyncio
import time

from tests.processes import Fleet, Resources

SETTLE_TIMEOUT_S = 20.0
STEADY_LOOKS = 5
LOOK_S = 0.2


class Baseline:
    """The most that each name held after loads of the kind that will be judged.

    A process that was started again is held to what its predecessor needed.
    """

    def __init__(self) -> None:
        self._most: dict[str, Resources] = {}

    async def widen(self, fleet: Fleet) -> None:
        """Take in what everybody holds now, once it stays the same."""
        last = _holdings(fleet)
        steady = 0
        until = time.monotonic() + SETTLE_TIMEOUT_S
        while steady < STEADY_LOOKS and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            now = _holdings(fleet)
            steady = steady + 1 if _grown(last, now) == _grown(now, last) == [] else 0
            last = now
        for name, held in last.items():
            most = self._most.get(name, held)
            self._most[name] = Resources(
                threads=max(held.threads, most.threads),
                fds=max(held.fds, most.fds),
                sockets=max(held.sockets, most.sockets),
                rss_mib=max(held.rss_mib, most.rss_mib),
            )

    async def settle(self, fleet: Fleet) -> list[str]:
        """What is still more than the baseline after a while; empty if nothing is.

        Sockets of closed connections linger for a moment, so this waits as long as it has to.
        """
        until = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            grown = _grown(self._most, _holdings(fleet))
            if not grown or time.monotonic() > until:
                return grown
            await asyncio.sleep(LOOK_S)


def _holdings(fleet: Fleet) -> dict[str, Resources]:
    return {name: member.resources() for name, member in fleet.members.items()}


def _grown(before: dict[str, Resources], after: dict[str, Resources]) -> list[str]:
    """One line for each count that is larger; memory is the soak's business."""
    return [
        f"{name}: {kind} {getattr(before[name], kind)} -> {getattr(now, kind)}"
        for name, now in after.items()
        for kind in ("threads", "fds", "sockets")
        if getattr(now, kind) > getattr(before[name], kind)
    ]
