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

Only a DISPATCHED job has an attempt; an attempt has one room, one decode node, and one prefill node
or none if decode computes the prompt itself. What was emitted before an attempt ended stays in
`output_ids` and goes to the next one, which continues after it. Aborts, deadlines and pauses reach
a job in every state but ENDED.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Protocol

import msgspec

from common.messages import (
    Adapter,
    Incarnation,
    Room,
    SamplingParams,
    StopReason,
    TokenLogprob,
    TokenOutput,
)
from router.errors import ApiError
from router.page_keys import PageKeys

HEADROOM_TOKENS = 128
"""Room to grow that a request is counted with on its decode node: decode's own reserve."""


def held_tokens(known: int, left: int) -> int:
    """Tokens of KV that a request with `left` tokens to generate is counted with."""
    return known + min(left, HEADROOM_TOKENS)


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
    ADAPTER = "adapter"
    """A node did not hold the request's adapter."""
    REFUSED = "refused"

    @property
    def bound(self) -> "ReplayBound":
        """What it counts against."""
        match self:
            case ReplayCause.RETRACTED | ReplayCause.LEFT:
                return ReplayBound.NONE
            case ReplayCause.DEATH | ReplayCause.ENGINE:
                return ReplayBound.DEATHS
            case ReplayCause.REFUSED:
                return ReplayBound.REFUSALS
            case _:
                return ReplayBound.FAULTS


class ReplayBound(Enum):
    """How often a request may be replayed for causes of one kind."""

    NONE = auto()
    """Nothing went wrong: not counted, replayed at once."""
    DEATHS = auto()
    """The request itself may be what broke the node: few tries."""
    REFUSALS = auto()
    """A node had no room: many tries."""
    FAULTS = auto()


# ---------------------------------------------------------------- what a listener hears


class NewTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens in order, each exactly once. `finish` comes with the last ones."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: StopReason | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of prompt tokens 1, 2, ..., where they were asked for: once, with the first tokens."""

    def ending(self, finish: StopReason) -> "NewTokens":
        """The same, as the last ones."""
        return self if finish is self.finish else msgspec.structs.replace(self, finish=finish)


class JobAborted(msgspec.Struct, frozen=True, gc=False):
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
    """One try of a job, on a pair of nodes or on a decode node alone."""

    room: Room
    prefill: Incarnation | None
    """None: decode computes the prompt itself."""
    decode: Incarnation
    base: int
    """Output tokens known before it began: the index of its first token."""
    decode_spoke: bool = False
    """From here on the prefill node's fate does not matter."""
    first_token: bool = False
    held: list[tuple[Incarnation, TokenOutput]] = field(default_factory=list)
    """What was said before the prompt's logprobs came, in order."""

    @property
    def nodes(self) -> tuple[Incarnation, ...]:
        """Who takes part, prefill first."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def computes(self) -> Incarnation:
        """The node that computes the prompt."""
        return self.prefill or self.decode


@dataclass(slots=True)
class Timeline:
    """Stage times on the caller's monotonic clock."""

    accepted: float
    dispatched: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None

    def note_tokens(self, now: float) -> float:
        """Tokens came; returns the wait since those before, or since acceptance."""
        before = self.accepted if self.last_token is None else self.last_token
        self.first_token = now if self.first_token is None else self.first_token
        self.last_token = now
        return now - before


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
    """For the next attempt: the wish for the prompt's logprobs is gone once they are here."""
    listener: Listener
    deadline: float
    times: Timeline
    priority: int = 0
    """Lower values come first."""
    adapter: Adapter | None = None
    """What was asked for, content and all, from acceptance to the end; None: the base model."""
    whole_path: bool = False
    """See `Terms`."""
    session: str = ""
    """The client's name for what it belongs to; empty where it gave none."""
    page_keys: PageKeys = field(default_factory=PageKeys)
    state: JobState = JobState.QUEUED
    output_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    attempts: int = 0
    attempt: Attempt | None = None
    replays: dict[ReplayCause, int] = field(default_factory=dict)
    avoid: set[Incarnation] = field(default_factory=set)
    """Nodes on which it failed."""
    stranded_since: float | None = None
    """Since when no node could ever take it."""
    last_fault: str = ""
    """Why its last attempt ended; for the client, should it be the last."""
    outcome: str = ""
    """How it ended; empty until then."""

    def move(self, state: JobState) -> None:
        if state not in EDGES[self.state]:
            raise IllegalTransition(f"{self.rid}: {self.state} -> {state}")
        self.state = state

    def note_tokens(self, news: NewTokens) -> None:
        """What the listener is about to be told is not asked for again."""
        self.output_ids.extend(news.token_ids)
        if news.prompt_logprobs is not None:
            self.sampling = msgspec.structs.replace(self.sampling, prompt_logprobs=None)

    def note_cached(self, cached_tokens: int) -> None:
        """What the first prefill did not compute is what the client is told."""
        if self.attempts == 1:
            self.cached_tokens = min(cached_tokens, len(self.prompt_ids))

    @property
    def prefers_pair(self) -> bool:
        """Whether decode shall compute its prompt only where nobody else can."""
        return self.whole_path or self.sampling.prompt_logprobs is not None

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def known_tokens(self) -> int:
        """Tokens whose KV the next attempt has to compute."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def held_tokens(self) -> int:
        """Tokens of KV it is counted with: those known and some room to grow."""
        return held_tokens(self.known_tokens, self.tokens_left)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still come."""
        return self.sampling.max_tokens - len(self.output_ids)

    @property
    def queue_key(self) -> tuple[int, int, int]:
        """Replays before new work, then by priority, then by acceptance."""
        return (0 if self.attempts else 1, self.priority, self.rank)

    def replays_like(self, cause: ReplayCause) -> int:
        """Replays that count against the same bound as `cause`."""
        return sum(count for known, count in self.replays.items() if known.bound is cause.bound)

    def complete(self) -> StopReason | None:
        """Whether what was emitted already is the whole output, and why."""
        count = len(self.output_ids)
        last = self.output_ids[-1] if count > self.sampling.min_tokens else None
        if last in self.sampling.stop_token_ids:
            return StopReason.STOP
        return StopReason.LENGTH if count >= self.sampling.max_tokens else None
