"""Prompts computed chunk by chunk: who comes next and how much. Pure, over plain numbers."""

from collections.abc import Sequence


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
