"""The attempts under way, how one begins on two nodes, what its tokens add to the output. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from common.messages import Generate, Incarnation, Room, TokenOutput
from router.nodes import NodeRegistry
from router.requests import Attempt, Job, NewTokens


class AttemptTable:
    """Jobs by the room of their attempt."""

    def __init__(self, random: Random, counters: Counter[str]) -> None:
        """`counters`: where stale rooms are counted."""
        self._random = random
        self._counters = counters
        self._jobs: dict[Room, Job] = {}
        self.paths = Counter({"disaggregated": 0, "local": 0})
        """Attempts begun on a pair of nodes, and on a decode node alone."""

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def begin(self, job: Job, prefill: Incarnation | None, decode: Incarnation) -> Attempt:
        """Draw a room for an attempt; without a prefill node decode computes the prompt."""
        room = 0
        while room == 0 or room in self._jobs:
            room = self._random.getrandbits(63)
        self._jobs[room] = job
        self.paths["local" if prefill is None else "disaggregated"] += 1
        return Attempt(room, prefill, decode, base=len(job.output_ids))

    def end(self, room: Room) -> None:
        del self._jobs[room]

    def find(self, node: Incarnation, room: Room) -> tuple[Job, Attempt] | None:
        """The live attempt that this node may speak of; None (stale) is counted."""
        job = self._jobs.get(room)
        attempt = None if job is None else job.attempt
        if job is None or attempt is None or node not in (attempt.decode, attempt.prefill):
            self._counters["stale_rooms"] += 1
            return None
        return job, attempt

    def depending_on(self, node: Incarnation, *, left: bool = False) -> list[Job]:
        """Jobs whose attempts end with this node, oldest first.

        `left`: it said goodbye, so its writes have ended and it has given back what it did not
        finish; of what it finished, decode will say whether the KV came.
        """
        jobs = [
            job
            for job in self._jobs.values()
            if job.attempt is not None
            and node in job.attempt.nodes
            and not outlived(node, job.attempt)
            and not (left and node == job.attempt.prefill and job.attempt.first_token)
        ]
        return sorted(jobs, key=lambda job: job.rank)


def outlived(node: Incarnation, attempt: Attempt) -> bool:
    """Whether the attempt does not need this node any more."""
    return attempt.decode_spoke and node == attempt.prefill


@dataclass(frozen=True, slots=True)
class Gap:
    """Tokens before these are missing: the attempt is worth nothing more."""


def generates(
    job: Job, attempt: Attempt, registry: NodeRegistry, now: float
) -> list[tuple[Incarnation, Generate]]:
    """The messages that start an attempt: to who computes the prompt, then to decode if that is
    another one, which is told of prefill and where it is."""
    first = Generate(
        room=attempt.room,
        rid=job.rid,
        attempt=job.attempts,
        prompt_ids=job.prompt_ids,
        output_ids=list(job.output_ids),
        sampling=job.sampling,
        age_s=now - job.times.accepted,
        priority=job.priority,
        adapter=job.adapter,
    )
    if attempt.prefill is None:
        return [(attempt.decode, first)]
    prefill = registry.get(attempt.prefill)
    assert prefill is not None, "an attempt begins on nodes that are there"
    sampling = job.sampling
    if sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    for_decode = msgspec.structs.replace(
        first,
        sampling=sampling,
        prefill_address=prefill.hello.side_channel,
        prefill_incarnation=attempt.prefill,
    )
    return [(attempt.prefill, first), (attempt.decode, for_decode)]


def in_turn(
    attempt: Attempt, node: Incarnation, output: TokenOutput
) -> Sequence[tuple[Incarnation, TokenOutput]]:
    """What can be taken in of an attempt that is to bring the prompt's logprobs, now that this node
    has said this.

    The two nodes' links are not ordered between them, and only who computes the prompt can tell its
    logprobs: until prefill has, what decode says is held, and the attempt depends on both.
    """
    if node != attempt.computes:
        attempt.held.append((node, output))
        return ()
    held, attempt.held = attempt.held, []
    return ((node, output), *held)


def news_of(job: Job, attempt: Attempt, output: TokenOutput) -> NewTokens | Gap | None:
    """The part of a message that the job does not have yet; None if it has all of it.

    Indices are absolute over the whole output:

        output_ids   0 .......... have
        message            index ......... end      index <= have, else a gap
        new                       have ... end
    """
    have = len(job.output_ids)
    count = len(output.token_ids)
    sampling = job.sampling
    fits = output.index == have and 0 < count <= sampling.max_tokens - have
    if fits and sampling.prompt_logprobs is None and output.prompt_logprobs is None:
        # Nearly always: all of it is new.
        whole = None if output.logprobs is None else tuple(output.logprobs)
        return NewTokens(tuple(output.token_ids), whole, output.finish)
    end = output.index + count
    finishes_early = output.finish is not None and end < have
    if output.index > have or output.index < attempt.base or finishes_early:
        return Gap()
    scores = output.prompt_logprobs
    if job.sampling.prompt_logprobs is not None and len(scores or ()) != len(job.prompt_ids) - 1:
        return Gap()
    skip = have - output.index
    stop = skip + job.sampling.max_tokens - have
    token_ids = tuple(output.token_ids[skip:stop])
    if not token_ids and output.finish is None:
        return None
    logprobs = None if output.logprobs is None else tuple(output.logprobs[skip:stop])
    return NewTokens(token_ids, logprobs, output.finish, None if scores is None else tuple(scores))
