"""Jobs that no node holds: those ready to go, and those that wait before the next try. Pure."""

import heapq
from collections import Counter
from collections.abc import Container, Iterator

from common.messages import Adapter
from router.requests import Job, JobState

SLACK = 64
"""Ended jobs that may lie in a heap before it is cleaned."""


class WaitingRoom:
    """A heap of those ready for each adapter, one of those put off, and what is in them in numbers.

    The jobs of an adapter whose nodes are full are passed over together, however many they are. A
    job that ends while it waits is struck off with `discard`; its heap entry is skipped when it
    comes up, or swept out when such entries outnumber the others.
    """

    def __init__(self) -> None:
        self._ready: dict[Adapter | None, list[tuple[tuple[int, int, int], Job]]] = {}
        self._ready_entries = 0
        self._later: list[tuple[float, int, Job]] = []
        self._num_ready = 0
        self._num_later = 0
        self._tokens: Counter[tuple[int, int]] = Counter()
        self.held_tokens = 0
        """Tokens of KV that those waiting will want at first."""

    def __bool__(self) -> bool:
        """Whether a job is ready to go."""
        return self._num_ready > 0

    @property
    def num_entries(self) -> int:
        """Places taken in memory, by living and ended jobs."""
        return self._ready_entries + len(self._later)

    @property
    def tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return sum(self._tokens.values())

    def tokens_ahead(self, priority: int) -> int:
        """Prompt tokens of those before a new job of this priority."""
        mine = (1, priority)
        return sum(tokens for place, tokens in self._tokens.items() if place <= mine)

    def put(self, job: Job) -> None:
        """A QUEUED job goes in by its rank."""
        heapq.heappush(self._ready.setdefault(job.adapter, []), (job.queue_key, job))
        self._ready_entries += 1
        self._num_ready += 1
        self._count(job, 1)

    def put_off(self, job: Job, until: float) -> None:
        """A BACKING_OFF job goes in until a time."""
        heapq.heappush(self._later, (until, job.rank, job))
        self._num_later += 1
        self._count(job, 1)

    def discard(self, job: Job) -> None:
        """A job ends; called before its state says so."""
        if job.state is JobState.QUEUED:
            self._num_ready -= 1
        elif job.state is JobState.BACKING_OFF:
            self._num_later -= 1
        else:
            return
        self._count(job, -1)

    def sweep(self) -> None:
        """Forget ended jobs where they have become many."""
        if self._ready_entries > 2 * self._num_ready + SLACK:
            for heap in self._ready.values():
                heap[:] = [entry for entry in heap if entry[1].state is JobState.QUEUED]
                heapq.heapify(heap)
            self._ready = {adapter: heap for adapter, heap in self._ready.items() if heap}
            self._ready_entries = sum(map(len, self._ready.values()))
        if len(self._later) > 2 * self._num_later + SLACK:
            self._later = [e for e in self._later if e[2].state is JobState.BACKING_OFF]
            heapq.heapify(self._later)

    def wake(self, now: float) -> None:
        """Those whose wait is over become ready."""
        while self._later and self._later[0][0] <= now:
            job = heapq.heappop(self._later)[2]
            if job.state is JobState.BACKING_OFF:
                self.discard(job)
                job.move(JobState.QUEUED)
                self.put(job)

    def take_ready(self, passed: Container[Adapter | None] = ()) -> Iterator[Job]:
        """Take ready jobs in order: replays first, then by priority, then by acceptance.

        `passed` is looked at each time: jobs of these adapters stay where they are.
        """
        while heads := [
            (heap[0][0], adapter) for adapter, heap in self._ready.items() if adapter not in passed
        ]:
            adapter = min(heads, key=_key)[1]
            heap = self._ready[adapter]
            job = heapq.heappop(heap)[1]
            self._ready_entries -= 1
            if not heap:
                del self._ready[adapter]
            if job.state is JobState.QUEUED:
                self.discard(job)
                yield job

    def _count(self, job: Job, sign: int) -> None:
        place = job.queue_key[:2]
        self._tokens[place] += sign * job.known_tokens
        if not self._tokens[place]:
            del self._tokens[place]
        self.held_tokens += sign * job.held_tokens


def _key(head: tuple[tuple[int, int, int], Adapter | None]) -> tuple[int, int, int]:
    return head[0]
