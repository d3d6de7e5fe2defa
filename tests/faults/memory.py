"""Resident memory of a fleet's processes over time, and whether it is flat."""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass, field

import psutil

from tests.processes import Fleet

LOOK_S = 1.0
YOUNG_S = 60.0
"""A process's first seconds are not judged: it loads, and its allocators find their size."""


@dataclass(slots=True)
class Series:
    """One process."""

    role: str
    points: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, MiB), the first from its start."""

    def grown_up(self) -> list[tuple[float, float]]:
        born = self.points[0][0]
        return [(at, mib) for at, mib in self.points if at - born >= YOUNG_S]


class MemoryWatch:
    """Looks at every process once a second."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._series: dict[int, Series] = {}

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            self._look(time.monotonic())
            await asyncio.sleep(LOOK_S)

    def _look(self, now: float) -> None:
        for member in self._fleet.members.values():
            if not member.is_alive:
                continue
            try:
                mib = psutil.Process(member.pid).memory_info().rss / 2**20
            except psutil.Error:
                continue  # it has ended this very moment
            series = self._series.setdefault(member.pid, Series(member.role))
            series.points.append((now, mib))

    def slopes(self) -> dict[str, float]:
        """MiB an hour by role, fitted over all its grown-up processes at once.

        Each process has its own level, so that a restart is no step.
        """
        sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for series in self._series.values():
            points = series.grown_up()
            if len(points) < 2:
                continue
            mean_at = sum(at for at, _ in points) / len(points)
            mean_mib = sum(mib for _, mib in points) / len(points)
            above, below = sums[series.role]
            above += sum((at - mean_at) * (mib - mean_mib) for at, mib in points)
            below += sum((at - mean_at) ** 2 for at, _ in points)
            sums[series.role] = (above, below)
        return {role: 3600 * above / below for role, (above, below) in sums.items() if below}

    def lines(self) -> list[str]:
        """Per role: a grown-up process at first, at last, and the most of any."""
        slopes = self.slopes()
        lines = []
        for role in ("router", "prefill", "decode"):
            old = [s.grown_up() for s in self._series.values() if s.role == role]
            old = [points for points in old if points]
            if not old:
                continue
            longest = max(old, key=lambda points: points[-1][0] - points[0][0])
            most = max(mib for points in old for _, mib in points)
            lines.append(
                f"memory {role}: {longest[0][1]:.0f} -> {longest[-1][1]:.0f} MiB in the oldest "
                f"process, seen for {longest[-1][0] - longest[0][0]:.0f} s; at most {most:.0f}; "
                f"slope {slopes.get(role, 0.0):+.1f} MiB/h over {len(old)} processes"
            )
        return lines
