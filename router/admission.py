"""Whether the router takes one more request, and when to come back if it does not. Pure.

Work is bounded in three ways: by the number of unfinished choices, by the prompt tokens that wait
to be computed (as seconds, once the pace of the cluster is known), and by the KV that all those
choices want, compared with what decode nodes hold. While nodes have room and nobody waits, only the
number counts: what can start now is never refused.

The pace is measured where it matters: prompts whose first token came, per second in which there was
enough to do, whatever held it up (prefill itself, or decode that had no room for more). So
`tokens ahead / pace` is the wait for a first token when prefill is the bottleneck and also when
decode is. `Retry-After` is what is too much, divided by the rate at which it goes away, plus a turn
behind those refused before, who will come back too.

A request that was accepted is never refused by this later, and replays do not pass here.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from common.messages import Adapter
from router.errors import ApiError, too_busy
from router.prepared import ChoiceSpec
from router.rates import RateMeter
from router.requests import held_tokens

MAX_RETRY_S = 60
"""Longest `Retry-After`: by then the estimate is stale."""


class Refusal(StrEnum):
    """Which bound was met; label of a metric."""

    REQUESTS = "requests"
    QUEUED_TOKENS = "queued_tokens"
    WAIT = "wait"
    KV = "kv"
    NO_NODE = "no_node"
    NO_ADAPTER = "no_adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """See `RouterConfig`."""

    max_requests: int = 4096
    max_queue_s: float = 10.0
    max_queued_tokens: int = 262_144
    max_kv_oversubscription: float = 32.0


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a request would add; its choices are counted one by one."""

    choices: int = 1
    prompt_tokens: int = 0
    kv_tokens: int = 0
    adapters: frozenset[Adapter] = frozenset()

    @classmethod
    def of(cls, choices: Sequence[ChoiceSpec]) -> "Demand":
        """Of all choices of a request."""
        return cls(
            choices=len(choices),
            prompt_tokens=sum(len(choice.prompt_ids) for choice in choices),
            adapters=frozenset(c.adapter for c in choices if c.adapter is not None),
            kv_tokens=sum(held_tokens(len(c.prompt_ids), c.sampling.max_tokens) for c in choices),
        )


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """What there is already."""

    tokens_ahead: int
    """Prompt tokens that are computed before the new request's."""
    queued_tokens: int
    """Prompt tokens not computed yet, of everybody."""
    held_tokens: int
    """Tokens of KV that unfinished choices want."""
    decode_tokens: int
    """Tokens of KV that decode nodes hold."""
    num_computing: int
    """Nodes that compute prompts."""


class Admission:
    """Measures the cluster's pace and applies the bounds."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.refused: Counter[Refusal] = Counter()
        self._prefill = RateMeter()
        self._computed = RateMeter()
        self._ends = RateMeter()
        self._freed = RateMeter()
        self._line = 0.0
        """Choices that were told to come back and have not had their turn yet."""
        self._line_at = 0.0

    # ------------------------------------------------------------ what is measured

    def note_work(self, *, queued: bool, unfinished: bool, now: float) -> None:
        """`queued`: enough prompts wait to keep the cluster busy. Call when that changes."""
        self._prefill.run(queued, now)
        self._computed.run(queued, now)
        self._ends.run(unfinished, now)
        self._freed.run(unfinished, now)

    def note_prefilled(self, known: int, computed: int, now: float) -> None:
        """A first token came. `computed`: of the `known` tokens those that were not cached."""
        self._prefill.add(known, now)
        self._computed.add(computed, now)

    def note_end(self, held_tokens: int, now: float) -> None:
        """A choice ended and gave its KV back."""
        self._ends.add(1, now)
        self._freed.add(held_tokens, now)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The cluster's pace in prompts' tokens, cached or not; None until it is known."""
        return self._prefill.per_second

    @property
    def computed_tokens_per_s(self) -> float | None:
        """The same in tokens that had to be computed."""
        return self._computed.per_second

    def wait_s(self, tokens_ahead: int) -> float | None:
        """Seconds until these tokens are computed; None while the pace is unknown."""
        pace = self._prefill.per_second
        return tokens_ahead / pace if pace else None

    # ------------------------------------------------------------ the decision

    def check_count(self, unfinished: int, now: float, choices: int = 1) -> None:
        """The bound that needs no look into the request.

        Raises:
            ApiError: 429.
        """
        excess = unfinished + choices - self.limits.max_requests
        if excess > 0:
            why = f"{unfinished} requests are unfinished, at most {self.limits.max_requests} may be"
            over = _Excess(Refusal.REQUESTS, why, excess, self._ends.per_second)
            raise self._refuse(over, choices, now)

    def check_work(self, demand: Demand, backlog: Backlog, now: float) -> None:
        """The others; while nodes have room and nobody waits there is no need to.

        Raises:
            ApiError: 429.
        """
        for bound in (self._check_tokens, self._check_wait, self._check_kv):
            excess = bound(demand, backlog)
            if excess is not None:
                raise self._refuse(excess, demand.choices, now)

    def _check_tokens(self, demand: Demand, backlog: Backlog) -> "_Excess | None":
        limit = self.limits.max_queued_tokens * max(1, backlog.num_computing)
        excess = backlog.queued_tokens + demand.prompt_tokens - limit
        if excess <= 0 or not backlog.queued_tokens:
            return None
        why = f"{backlog.queued_tokens} prompt tokens wait, at most {limit} may"
        return _Excess(Refusal.QUEUED_TOKENS, why, excess, self._prefill.per_second)

    def _check_wait(self, _: Demand, backlog: Backlog) -> "_Excess | None":
        wait_s = self.wait_s(backlog.tokens_ahead)
        if wait_s is None or wait_s <= self.limits.max_queue_s:
            return None
        why = f"the wait would be {wait_s:.0f} s, at most {self.limits.max_queue_s:g} s may be"
        return _Excess(Refusal.WAIT, why, wait_s - self.limits.max_queue_s, 1.0)

    def _check_kv(self, demand: Demand, backlog: Backlog) -> "_Excess | None":
        limit = int(self.limits.max_kv_oversubscription * backlog.decode_tokens)
        excess = backlog.held_tokens + demand.kv_tokens - limit
        if excess <= 0 or not backlog.held_tokens:
            return None
        why = f"unfinished requests want {backlog.held_tokens} tokens of KV, at most {limit} may be"
        return _Excess(Refusal.KV, why, excess, self._freed.per_second)

    def _refuse(self, excess: "_Excess", choices: int, now: float) -> ApiError:
        self.refused[excess.refusal] += 1
        seconds = excess.amount / excess.per_second if excess.per_second else 0.0
        seconds += self._stand_in_line(choices, now)
        retry_s = min(MAX_RETRY_S, max(1, math.ceil(seconds)))
        return too_busy(f"overloaded: {excess.why}; try again in {retry_s} s", retry_s)

    def _stand_in_line(self, choices: int, now: float) -> float:
        """Seconds until those refused before had their turn, at the pace at which choices end."""
        pace = self._ends.per_second
        if not pace:
            return 0.0
        self._line = max(0.0, self._line - pace * (now - self._line_at))
        self._line_at = now
        wait_s = self._line / pace
        self._line = min(self._line + choices, pace * MAX_RETRY_S)
        return wait_s


@dataclass(frozen=True, slots=True)
class _Excess:
    """By how much a bound is passed, and how fast that goes away."""

    refusal: Refusal
    why: str
    amount: float
    per_second: float | None
