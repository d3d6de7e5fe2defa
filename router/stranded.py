"""Bounds the wait of jobs that no node of the cluster could ever take. Pure.

A job whose adapter the cluster does not have any more ends at once: nobody is expected to bring it
back, and a client that is told so can load it again. One whose adapter is merely held by no pair of
nodes now waits like one for which there are no nodes: they may be starting again.
"""

from collections.abc import Iterable

from common.messages import Adapter
from router.adapters import AdapterCatalogue
from router.errors import ApiError, no_adapter, unavailable
from router.nodes import NodeRegistry
from router.requests import Job, JobState


class StrandedWatch:
    """Notes since when a queued job fits no pair of nodes; a pause does not count."""

    def __init__(self, registry: NodeRegistry, adapters: AdapterCatalogue, wait_s: float) -> None:
        self._registry = registry
        self._adapters = adapters
        self._wait_s = wait_s
        self._any = False

    def overdue(self, jobs: Iterable[Job], now: float, *, idle: bool) -> list[tuple[Job, ApiError]]:
        """Those that have waited too long, and why. `idle`: nobody waits for a node at all."""
        capacity: dict[Adapter | None, int] = {None: self._registry.fleet.capacity_tokens() or 0}
        if capacity[None] and idle and not self._any:
            return []
        self._any = False
        late = []
        for job in jobs:
            adapter = job.adapter
            if adapter not in capacity:
                capacity[adapter] = self._registry.fleet.capacity_tokens(adapter) or 0
            if job.state is not JobState.QUEUED or job.max_total_tokens <= capacity[adapter]:
                job.stranded_since = None
                continue
            self._any = True
            if adapter is not None and not self._adapters.expects(adapter):
                late.append((job, no_adapter(adapter.name)))
            elif job.stranded_since is None:
                job.stranded_since = now
            elif now - job.stranded_since > self._wait_s:
                late.append((job, self._unavailable(job)))
        return late

    def _unavailable(self, job: Job) -> ApiError:
        why = (
            self._registry.fleet.missing(job.adapter) or "no node that is left can hold the request"
        )
        before = f"; before that: {job.last_fault}" if job.last_fault else ""
        return unavailable(why + before)
