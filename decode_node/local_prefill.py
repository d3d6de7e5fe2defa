"""Prompts that a decode node computes itself, beside its running batch. Pure.

    prealloc ─(pages of the whole prompt, a slot)─▶ prefilling ─(last chunk)─▶ running

Such a request has no prefill node: nothing is written into its pages, so it can be stopped in any
state and gives them back at once. A step carries the running batch's tokens and at most `beside`
tokens of prompts, the first in rank first: that is what bounds how much longer a step takes for the
streams that run (chunked prefill after Sarathi-Serve). Where nobody runs there is nobody to be held
up, and a step computes as much as a prefill node's would.
"""

from collections.abc import Callable

from common.chunked_prefill import next_chunks
from common.kv_cache.manager import KVCacheManager
from common.lifecycle import ReqQueue
from common.plan import Row
from decode_node.request import DecodeReq


class LocalPrefill:
    """Deals out a step's prompt tokens."""

    def __init__(
        self, prefilling: ReqQueue[DecodeReq], kv: KVCacheManager, *, beside: int, alone: int
    ) -> None:
        """Prompt tokens of a step: `beside` a running batch, and `alone` where nobody runs."""
        self._prefilling = prefilling
        self._kv = kv
        self._beside = beside
        self._alone = alone

    def rows(
        self, lora_slot: Callable[[DecodeReq], int | None], *, anybody_runs: bool
    ) -> list[tuple[DecodeReq, Row]]:
        """The next chunks. `lora_slot`: where a request's adapter is."""
        budget = self._beside if anybody_runs else self._alone
        return next_chunks(self._prefilling.snapshot(), budget, self._kv, lora_slot)

    def check_invariants(self, pages_for: Callable[[int], int]) -> None:
        """Raise unless each has its slot, all its pages, and something left to compute."""
        for req in self._prefilling:
            if req.slot is None or len(req.pages) < pages_for(req.num_tokens):
                raise AssertionError(f"{req.rid} prefills without a slot or without its pages")
            if not req.is_local or req.num_uncomputed <= 0:
                raise AssertionError(f"{req.rid} prefills and has nothing to compute here")
