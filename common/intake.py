"""What a node refuses, and why: pure decisions over plain numbers."""

from common.drain import Leave
from common.messages import FailureKind
from common.request import Req
from common.settings import SchedulerSettings

Refusal = tuple[FailureKind, str]


def never_fits(req: Req, settings: SchedulerSettings, pages_needed: int) -> Refusal | None:
    """Why this node can never run the request; None if it can."""
    problem = req.problem(settings.vocab_size, settings.max_model_len)
    if problem is not None:
        return FailureKind.INVALID, problem
    if pages_needed > settings.num_pages:
        have = settings.num_pages
        return FailureKind.TOO_LARGE, f"needs {pages_needed} pages, the pool has {have}"
    return None


def not_now(num_waiting: int, settings: SchedulerSettings, leave: Leave) -> Refusal | None:
    """Why this node takes no request at the moment; None if it does."""
    if leave.under_way:
        return FailureKind.DRAINING, "this node is leaving"
    if num_waiting >= settings.max_queued_requests:
        return FailureKind.REFUSED, f"{num_waiting} requests wait here already"
    return None
