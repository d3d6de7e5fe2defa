"""How an attempt begins on two nodes, and what its tokens add to the output. Pure."""

from dataclasses import dataclass

import msgspec

from common.messages import Generate, TokenOutput
from router.requests import Attempt, Job, NewTokens


@dataclass(frozen=True, slots=True)
class Gap:
    """Tokens before these are missing: the attempt is worth nothing more."""


def generate_pair(
    job: Job, attempt: Attempt, prefill_address: str, now: float
) -> tuple[Generate, Generate]:
    """The messages that start an attempt: prefill's, and decode's, which names prefill."""
    for_prefill = Generate(
        room=attempt.room,
        rid=job.rid,
        attempt=job.attempts,
        prompt_ids=job.prompt_ids,
        output_ids=list(job.output_ids),
        sampling=job.sampling,
        age_s=now - job.times.accepted,
    )
    for_decode = msgspec.structs.replace(
        for_prefill, prefill_address=prefill_address, prefill_incarnation=attempt.prefill
    )
    return for_prefill, for_decode


def news_of(job: Job, attempt: Attempt, output: TokenOutput) -> NewTokens | Gap | None:
    """The part of a message that the job does not have yet; None if it has all of it.

    Indices are absolute over the whole output:

        output_ids   0 .......... have
        message            index ......... end      index <= have, else a gap
        new                       have ... end
    """
    have = len(job.output_ids)
    end = output.index + len(output.token_ids)
    finishes_early = output.finish is not None and end < have
    if output.index > have or output.index < attempt.base or finishes_early:
        return Gap()
    skip = have - output.index
    stop = skip + job.sampling.max_tokens - have
    token_ids = tuple(output.token_ids[skip:stop])
    if not token_ids and output.finish is None:
        return None
    logprobs = None if output.logprobs is None else tuple(output.logprobs[skip:stop])
    return NewTokens(token_ids, logprobs, output.finish)
