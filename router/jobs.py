"""All unfinished jobs by the name that nodes know them by. Pure."""

from collections.abc import Iterator
from random import Random

from common.messages import Adapter, SamplingParams
from router.page_keys import PageKeys
from router.protocol.terms import Terms
from router.requests import Job, JobState, Listener, Timeline


class JobTable:
    """From acceptance to the end; what is counted of jobs is counted here, from the jobs."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._jobs: dict[str, Job] = {}
        self._accepted = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """A snapshot: jobs may end while it is gone through."""
        return iter(tuple(self._jobs.values()))

    def count(self, state: JobState) -> int:
        return sum(1 for job in self._jobs.values() if job.state is state)

    def of_adapter(self, name: str) -> int:
        """Unfinished jobs that need an adapter of this name."""
        jobs = self._jobs.values()
        return sum(1 for job in jobs if job.adapter is not None and job.adapter.name == name)

    def due(self, now: float) -> list[Job]:
        """Those whose time is over."""
        return [job for job in self._jobs.values() if job.deadline <= now]

    def accept(
        self,
        public_rid: str,
        suffix: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        listener: Listener,
        *,
        now: float,
        deadline: float,
        terms: Terms,
        adapter: Adapter | None,
    ) -> Job:
        """A new job, with a name that no other has."""
        rid = public_rid + suffix
        while rid in self._jobs:  # a client may use a name twice; nodes must not see it twice
            rid = f"{public_rid}{suffix}~{self._random.getrandbits(32):08x}"
        self._accepted += 1
        job = Job(
            rid=rid,
            public_rid=public_rid,
            rank=self._accepted,
            prompt_ids=prompt_ids,
            sampling=sampling,
            listener=listener,
            deadline=deadline,
            times=Timeline(now),
            priority=terms.priority,
            whole_path=terms.whole_path,
            session=terms.session,
            adapter=adapter,
            page_keys=PageKeys(adapter.digest if adapter is not None else ""),
        )
        self._jobs[rid] = job
        return job

    def remove(self, job: Job) -> None:
        """It has ended."""
        del self._jobs[job.rid]
