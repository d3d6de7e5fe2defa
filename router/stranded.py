"""Bounds the wait of jobs that no node of the cluster could ever take. Pure."""

from collections.abc import Iterable

from router.nodes import NodeRegistry
from router.requests import Job, JobState


class StrandedWatch:
    """Notes since when a queued job fits no pair of nodes; a pause does not count."""

    def __init__(self, registry: NodeRegistry, wait_s: float) -> None:
        self._registry = registry
        self._wait_s = wait_s
        self._any = False

    def overdue(self, jobs: Iterable[Job], now: float, *, idle: bool) -> list[Job]:
        """Those that have waited too long. `idle`: nobody waits for a node at all."""
        capacity = self._registry.capacity_tokens() or 0
        if capacity and idle and not self._any:
            return []
        self._any = False
        late = []
        for job in jobs:
            if job.state is not JobState.QUEUED or job.max_total_tokens <= capacity:
                job.stranded_since = None
                continue
            self._any = True
            if job.stranded_since is None:
                job.stranded_since = now
            elif now - job.stranded_since > self._wait_s:
                late.append(job)
        return late
