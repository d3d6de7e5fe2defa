"""Prompts computed chunk by chunk, on either role: who comes next and how much. Pure."""

from collections.abc import Callable, Sequence

from common.kv_cache.manager import KVCacheManager
from common.lifecycle import R
from common.plan import Row


def next_chunks(
    reqs: Sequence[R], budget: int, kv: KVCacheManager, lora_slot: Callable[[R], int | None]
) -> list[tuple[R, Row]]:
    """The rows of a step of `budget` prompt tokens; `reqs` in the order of their turns.

    `lora_slot`: where a request's adapter is.
    """
    _begin_behind_cached(reqs, budget, kv)
    shares = split_budget([req.num_unplanned for req in reqs], budget)
    return [
        (req, req.next_chunk(share, lora_slot(req)))
        for req, share in zip(reqs, shares, strict=True)
        if share
    ]


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


def _begin_behind_cached(reqs: Sequence[R], budget: int, kv: KVCacheManager) -> None:
    """Let those of `reqs` whose turn has come, for a step of `budget` tokens, begin behind what is
    cached by now: more than at admission, where those before them had to compute what they share.
    """
    for req in reqs:
        if budget <= 0:
            break
        if not req.started and req.reads_cache:
            req.start_behind(kv.extend_hit(req))
        budget -= req.num_unplanned
