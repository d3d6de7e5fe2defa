"""Jobs that no node holds: those ready to go, and those that wait before the next try. Pure."""

import heapq
from collections.abc import Iterator

from router.requests import Job, JobState


class WaitingRoom:
    """Two heaps. Jobs that ended meanwhile are skipped when they come up."""

    def __init__(self) -> None:
        self._ready: list[tuple[tuple[int, int], Job]] = []
        self._later: list[tuple[float, int, Job]] = []

    def __bool__(self) -> bool:
        """Whether a job may be ready to go."""
        return bool(self._ready)

    def put(self, job: Job) -> None:
        """A QUEUED job goes in by its rank."""
        heapq.heappush(self._ready, (job.queue_key, job))

    def put_off(self, job: Job, until: float) -> None:
        """A BACKING_OFF job goes in until a time."""
        heapq.heappush(self._later, (until, job.rank, job))

    def wake(self, now: float) -> None:
        """Those whose wait is over become ready."""
        while self._later and self._later[0][0] <= now:
            job = heapq.heappop(self._later)[2]
            if job.state is JobState.BACKING_OFF:
                job.move(JobState.QUEUED)
                self.put(job)

    def take_ready(self) -> Iterator[Job]:
        """Take ready jobs in order: replays first, each group in order of acceptance."""
        while self._ready:
            job = heapq.heappop(self._ready)[1]
            if job.state is JobState.QUEUED:
                yield job
