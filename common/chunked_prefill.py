"""Prompts computed chunk by chunk: who comes next and how much. Pure, over plain numbers."""

from collections.abc import Sequence

from common.kv_cache.manager import KVCacheManager
from common.lifecycle import R


def split_budget(remaining: Sequence[int], budget: int) -> list[int]:
    """Deal `budget` tokens out to requests that still need `remaining` tokens, in their order.

    First come, first served: the first takes what it needs, the rest goes on to the next, so a
    step is full and several short prompts share it (chunked prefill after Sarathi-Serve).
    The result has one entry per request, 0 for those that wait.
    """
    shares = []
    for need in remaining:
        share = min(need, budget)
        shares.append(share)
        budget -= share
    return shares


def begin_behind_cached(reqs: Sequence[R], budget: int, kv: KVCacheManager) -> list[R]:
    """Let those of `reqs` whose turn has come, for a step of `budget` tokens, begin behind what is
    cached by now: more than at admission, where those before them had to compute what they share.

    Returns those that have begun.
    """
    begun = []
    for req in reqs:
        if budget <= 0:
            break
        if not req.started and req.reads_cache:
            req.start_behind(kv.extend_hit(req))
            begun.append(req)
        budget -= req.num_uncomputed
    return begun
