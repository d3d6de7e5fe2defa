"""Whether an attempt that failed is followed by another, and when. Pure.

Retraction and a node's goodbye are nobody's fault: replayed at once, without bound. A node's death
or a raising forward pass may be the request's own doing, so it gets few more tries, after a death
the first one at once. Anything else (a lost message, a failed transfer) is tried again after a
growing wait, most often where a node merely had no room. What is given up ends with its reason.
"""

from dataclasses import dataclass
from random import Random

from common.messages import FailureKind, Incarnation
from router.errors import ApiError, internal, too_busy, unavailable
from router.node import Loss
from router.requests import Attempt, Job, ReplayBound, ReplayCause

CAUSE_OF_LOSS = {
    Loss.SILENT: ReplayCause.DEATH,
    Loss.UNREACHABLE: ReplayCause.DEATH,
    Loss.REPLACED: ReplayCause.DEATH,
    Loss.LEFT: ReplayCause.LEFT,
    Loss.RELINKED: ReplayCause.LINK,
    Loss.GAP: ReplayCause.LINK,
}
CAUSE_OF_FAILURE = {
    FailureKind.REFUSED: ReplayCause.REFUSED,
    FailureKind.DRAINING: ReplayCause.LEFT,
    FailureKind.PEER_LOST: ReplayCause.PEER_LOST,
    FailureKind.TRANSFER: ReplayCause.TRANSFER,
    FailureKind.EXPIRED: ReplayCause.EXPIRED,
    FailureKind.ENGINE: ReplayCause.ENGINE,
    FailureKind.ADAPTER: ReplayCause.ADAPTER,
}
"""The other kinds are the request's own fault and are never replayed."""

MAX_BACKOFF_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLimits:
    """See `RouterConfig`."""

    max_after_death: int = 2
    max_after_fault: int = 5
    max_after_refusal: int = 20
    backoff_s: float = 0.1


@dataclass(frozen=True, slots=True)
class ReplayAfter:
    """Try again after this wait; 0 means at once."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    error: ApiError


def judge(
    job: Job, cause: ReplayCause, why: str, limits: ReplayLimits, random: Random
) -> ReplayAfter | GiveUp:
    """Decide on a job whose attempt just ended for `cause`; `why` is for the client."""
    match cause.bound:
        case ReplayBound.NONE:
            return ReplayAfter(0.0)
        case ReplayBound.DEATHS:
            most = limits.max_after_death
        case ReplayBound.FAULTS:
            most = limits.max_after_fault
        case ReplayBound.REFUSALS:
            most = limits.max_after_refusal
    tried = job.replays_like(cause)
    if tried >= most:
        return GiveUp(_exhausted(cause, why, tried + 1))
    if cause is ReplayCause.DEATH and not tried:
        return ReplayAfter(0.0)
    wait_s = min(MAX_BACKOFF_S, limits.backoff_s * 2 ** min(tried, 16))
    return ReplayAfter(wait_s * random.uniform(0.5, 1.0))


def _exhausted(cause: ReplayCause, why: str, failures: int) -> ApiError:
    if cause is ReplayCause.REFUSED:
        return too_busy(f"no node takes the request now: {why}", int(MAX_BACKOFF_S))
    if cause is ReplayCause.ADAPTER:
        return unavailable(f"no node can use the adapter now: {why}", "adapter_unavailable")
    attempts = "one attempt" if failures == 1 else f"{failures} attempts"
    return internal(f"gave up after {attempts}: {why or cause.value}", cause.value)


def blamed_for(kind: FailureKind, node: Incarnation, attempt: Attempt) -> set[Incarnation]:
    """Which nodes the next attempt had better avoid, when `node` reports a failure."""
    match kind:
        case FailureKind.PEER_LOST:
            return set(attempt.nodes) - {node}
        case FailureKind.TRANSFER | FailureKind.EXPIRED:
            return set(attempt.nodes)
        case _:
            return {node}
