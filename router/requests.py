"""One choice of one request, from acceptance to its one answer. Pure data and its life-cycle.

             picked                       finish, abort, deadline, error
    QUEUED ─────────▶ DISPATCHED ───────────────────────────────────────▶ ENDED
     │  ▲                │    │                                             ▲
     │  │ retracted,     │    │ fault                                       │
     │  │ node died      │    ▼                                             │
     │  └────────────────┘  BACKING_OFF ── abort, deadline ─────────────────┤
     │  ▲                        │                                          │
     │  └── wait over ───────────┘                                          │
     └──────────────────────────────────────────────────────────────────────┘

Only a DISPATCHED job has an attempt; an attempt has one room, one prefill and one decode node. What
was emitted before an attempt ended stays in `output_ids` and goes to the next one, which continues
after it. Aborts, deadlines and pauses reach a job in every state but ENDED.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from common.messages import Incarnation, Room, SamplingParams, StopReason, TokenLogprob
from router.errors import ApiError


class JobState(StrEnum):
    QUEUED = "queued"
    """Waits for a pair of nodes."""
    DISPATCHED = "dispatched"
    """An attempt is on two nodes."""
    BACKING_OFF = "backing_off"
    """The last attempt failed; the next one waits a little."""
    ENDED = "ended"
    """The answer is decided; what nodes still say of it is stale."""


EDGES: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.DISPATCHED, JobState.ENDED}),
    JobState.DISPATCHED: frozenset({JobState.QUEUED, JobState.BACKING_OFF, JobState.ENDED}),
    JobState.BACKING_OFF: frozenset({JobState.QUEUED, JobState.ENDED}),
    JobState.ENDED: frozenset(),
}


class IllegalTransition(AssertionError):
    """A bug: the life-cycle has no such edge."""


class ReplayCause(StrEnum):
    """Why an attempt was followed by another; label of a metric."""

    RETRACTED = "retracted"
    DEATH = "death"
    LEFT = "left"
    LINK = "link"
    """Messages were lost between a node and the router."""
    GAP = "gap"
    """Tokens of this room were lost."""
    TRANSFER = "transfer"
    PEER_LOST = "peer_lost"
    EXPIRED = "expired"
    ENGINE = "engine"
    REFUSED = "refused"

    @property
    def is_free(self) -> bool:
        """Whether nothing went wrong: not counted, replayed at once."""
        return self in (ReplayCause.RETRACTED, ReplayCause.LEFT)

    @property
    def may_kill(self) -> bool:
        """Whether the request itself may be what broke the node."""
        return self in (ReplayCause.DEATH, ReplayCause.ENGINE)


# ---------------------------------------------------------------- what a listener hears


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens in order, each exactly once. `finish` comes with the last ones."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: StopReason | None = None


@dataclass(frozen=True, slots=True)
class JobAborted:
    """Ended on demand: nothing more will come."""

    message: str


@dataclass(frozen=True, slots=True)
class JobFailed:
    error: ApiError


Output = NewTokens | JobAborted | JobFailed


class Listener(Protocol):
    """Who gets a job's outputs."""

    def deliver(self, output: Output) -> None: ...


# ---------------------------------------------------------------- the job


@dataclass(slots=True)
class Attempt:
    """One try of a job on a pair of nodes."""

    room: Room
    prefill: Incarnation
    decode: Incarnation
    base: int
    """Output tokens known before it began: the index of its first token."""
    decode_spoke: bool = False
    """From here on the prefill node's fate does not matter."""
    first_token: bool = False

    def other(self, incarnation: Incarnation) -> Incarnation:
        return self.decode if incarnation == self.prefill else self.prefill


@dataclass(slots=True)
class Timeline:
    """Stage times on the caller's monotonic clock."""

    accepted: float
    dispatched: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None


@dataclass(slots=True, eq=False)
class Job:
    """One choice. Written only by the dispatcher."""

    rid: str
    """Unique among the unfinished; nodes see this one."""
    public_rid: str
    """The client's name for the whole request; several jobs may share it."""
    rank: int
    """Order of acceptance."""
    prompt_ids: list[int]
    sampling: SamplingParams
    listener: Listener
    deadline: float
    times: Timeline
    state: JobState = JobState.QUEUED
    output_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    attempts: int = 0
    attempt: Attempt | None = None
    replays: dict[ReplayCause, int] = field(default_factory=dict)
    avoid: set[Incarnation] = field(default_factory=set)
    """Nodes on which it failed."""
    prefer: Incarnation | None = None
    """The prefill node that has its prefix."""
    stranded_since: float | None = None
    """Since when no node could ever take it."""
    outcome: str = ""
    """How it ended; empty until then."""

    def move(self, state: JobState) -> None:
        if state not in EDGES[self.state]:
            raise IllegalTransition(f"{self.rid}: {self.state} -> {state}")
        self.state = state

    def note_cached(self, cached_tokens: int) -> None:
        """What the first prefill did not compute is what the client is told."""
        if self.attempts == 1:
            self.cached_tokens = min(cached_tokens, len(self.prompt_ids))

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def queue_key(self) -> tuple[int, int]:
        """Replays before new work, each in order of acceptance."""
        return (0 if self.attempts else 1, self.rank)

    def replays_of(self, *, deaths: bool) -> int:
        """Counted replays: those that may be the request's own fault, or the others."""
        return sum(
            count
            for cause, count in self.replays.items()
            if not cause.is_free and cause.may_kill is deaths
        )

    def complete(self) -> StopReason | None:
        """Whether what was emitted already is the whole output, and why."""
        count = len(self.output_ids)
        last = self.output_ids[-1] if count > self.sampling.min_tokens else None
        if last in self.sampling.stop_token_ids:
            return StopReason.STOP
        return StopReason.LENGTH if count >= self.sampling.max_tokens else None
