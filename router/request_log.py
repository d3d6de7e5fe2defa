"""One JSON line at each request's end, with its stage times. Pure formatting."""

import logging

import msgspec

from router.requests import Job

_encode = msgspec.json.Encoder().encode
log = logging.getLogger("router.requests")


def log_end(job: Job) -> None:
    """Write the line of an ended job."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", end_line(job))


def end_line(job: Job) -> str:
    """The line: ids, outcome, tokens, attempts, and seconds since acceptance for each stage."""
    accepted = job.times.accepted
    stages = {
        "dispatched_s": job.times.dispatched,
        "first_token_s": job.times.first_token,
        "last_token_s": job.times.last_token,
        "ended_s": job.times.ended,
    }
    line = {
        "event": "request_end",
        "rid": job.rid,
        "outcome": job.outcome,
        "adapter": None if job.adapter is None else job.adapter.name,
        "prompt_tokens": len(job.prompt_ids),
        "output_tokens": len(job.output_ids),
        "cached_tokens": job.cached_tokens,
        "attempts": job.attempts,
        "replays": {cause.value: count for cause, count in job.replays.items()},
        **{name: round(at - accepted, 6) for name, at in stages.items() if at is not None},
    }
    return _encode(line).decode()
