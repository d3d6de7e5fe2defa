"""What a node knows of one attempt of one choice. The two nodes add their own fields to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common.kv_cache.hashing import PageHashes
from common.kv_cache.prefix_cache import CachedPage
from common.messages import (
    Adapter,
    Generate,
    Incarnation,
    Room,
    SamplingParams,
    StopReason,
    TokenLogprob,
    TokenOutput,
)
from common.plan import Row, SlotInit


@dataclass(eq=False, slots=True, kw_only=True)
class Req:
    """One room on one node.

    `output_ids` grows as tokens become known here; `pages` are the page ids of its KV in logical
    order. `queue` is written by `ReqQueue.take` alone and is the request's state.
    """

    room: Room
    rid: str
    attempt: int
    router: Incarnation
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: SamplingParams
    arrived: float
    """When the router accepted it, on this node's clock."""
    added: float
    """When it came to this node."""
    priority: int = 0
    """Lower values come first."""
    pages: list[int] = field(default_factory=list)
    chain: list[CachedPage] = field(default_factory=list)
    """Entries of the prefix cache that it holds: those of its first pages. Written, like `pages`,
    by `KVCacheManager` alone."""
    hashes: PageHashes | None = None
    """Of its pages, as far as anybody asked."""
    slot: int | None = None
    started: bool = False
    """The runner knows its slot."""
    num_computed: int = 0
    """Positions of its prompt whose KV is in `pages`, while this node computes them."""
    computing: int = 0
    """Positions that steps in flight compute. Written, like `drawing`, by `Flight` alone."""
    drawing: int = 0
    """Tokens that steps in flight draw: outputs that are not known yet."""
    cached_tokens: int = 0
    """Prompt tokens that this node did not have to compute; none once the first token has left."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Of prompt tokens 1, 2, ... as they are computed; None where they were not asked for, or have
    left with the first token."""
    queue: Any = None
    """The `ReqQueue` that holds it; None before the first."""
    stages: dict[str, float] = field(default_factory=dict)
    """Stage name -> clock value at which it was reached."""
    last_token_at: float | None = None
    adapter: Adapter | None = None
    """None: the base model."""
    lora: int | None = None
    """This node's number for the adapter, so that another of the same name is never taken for it;
    None for the base model."""
    lora_since: float | None = None
    """Since when its adapter keeps it waiting; None while it does not."""
    lora_wait_s: float = 0.0
    """How long it did so before."""

    @classmethod
    def fields_of(cls, generate: Generate, router: Incarnation, now: float) -> dict[str, Any]:
        """Constructor arguments that a `Generate` determines."""
        return {
            "room": generate.room,
            "rid": generate.rid,
            "attempt": generate.attempt,
            "router": router,
            "prompt_ids": generate.prompt_ids,
            "output_ids": list(generate.output_ids),
            "sampling": generate.sampling,
            "arrived": now - generate.age_s,
            "added": now,
            "priority": generate.priority,
            "adapter": generate.adapter,
            "prompt_logprobs": None if generate.sampling.prompt_logprobs is None else [],
        }

    @property
    def rank(self) -> tuple[int, float, int]:
        """Its place in every queue: by priority, then by age. The last is retracted first."""
        return (self.priority, self.arrived, self.room)

    @property
    def adapter_digest(self) -> str:
        """Of its adapter's content; empty for the base model."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def num_tokens(self) -> int:
        """Prompt and known outputs."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def remaining(self) -> int:
        """Tokens it has left to generate; on a prefill node, to compute."""
        return self.sampling.max_tokens - len(self.output_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that this node still has to compute, if it is the one to."""
        return self.num_tokens - self.num_computed

    @property
    def num_unplanned(self) -> int:
        """Those of them that no step in flight computes."""
        return self.num_uncomputed - self.computing

    @property
    def draws_its_last(self) -> bool:
        """Whether it reaches `max_tokens` with what is in flight."""
        drawing = self.drawing
        return drawing > 0 and len(self.output_ids) + drawing >= self.sampling.max_tokens

    @property
    def reads_cache(self) -> bool:
        """Whether the node that computes its prompt may leave cached tokens out: these have no
        logits."""
        return self.sampling.prompt_logprobs is None

    @property
    def max_kv_tokens(self) -> int:
        """Most positions that can ever hold KV: the very last token's is never computed."""
        return len(self.prompt_ids) + self.sampling.max_tokens - 1

    def problem(self, vocab_size: int, max_model_len: int) -> str | None:
        """Why no node with these limits can ever run it; None if one can."""
        left = self.sampling.max_tokens - len(self.output_ids)
        if not self.prompt_ids or left < 1:
            return f"{len(self.prompt_ids)} prompt tokens, {left} left to generate"
        longest = len(self.prompt_ids) + self.sampling.max_tokens
        if longest > max_model_len:
            return f"{longest} tokens exceed the context of {max_model_len}"
        ids = self.context()
        if min(ids) < 0 or max(ids) >= vocab_size:
            return f"token ids must be in [0, {vocab_size})"
        return None

    def context(self) -> list[int]:
        """All tokens known: prompt, then outputs."""
        return [*self.prompt_ids, *self.output_ids]

    def tokens(self, start: int, end: int) -> list[int]:
        """The known tokens at positions `start` to `end`."""
        split = len(self.prompt_ids)
        if end <= split:
            return self.prompt_ids[start:end]
        outputs = self.output_ids[max(0, start - split) : end - split]
        return self.prompt_ids[start:] + outputs

    def start_behind(self, num_cached: int) -> None:
        """This node computes its prompt; the KV of the first `num_cached` tokens is there."""
        self.num_computed = num_cached
        self.cached_tokens = min(num_cached, len(self.prompt_ids))

    def take_init(self) -> SlotInit | None:
        """For its first row here: what the runner has to know of the slot's new owner."""
        if self.started:
            return None
        self.started = True
        return SlotInit(self.sampling, self.prompt_ids, tuple(self.output_ids))

    def next_chunk(self, share: int, lora_slot: int | None) -> Row:
        """The next `share` positions of its prompt; the last of them all draws the next token.

        All its pages go to the runner with the first. `lora_slot`: where its adapter is.
        """
        start = self.num_computed + self.computing
        end = start + share
        init = self.take_init()
        assert self.slot is not None
        return Row(
            slot=self.slot,
            start=start,
            token_ids=self.tokens(start, end),
            new_pages=tuple(self.pages) if init is not None else (),
            sample_index=len(self.output_ids) if end == self.num_tokens else None,
            init=init,
            lora_slot=lora_slot,
            prompt_logprobs=self.sampling.prompt_logprobs,
            next_ids=self._next_prompt_ids(start, end),
        )

    def _next_prompt_ids(self, start: int, end: int) -> list[int]:
        """What positions [start, end) are to be asked about: the prompt's token behind each."""
        return [] if self.prompt_logprobs is None else self.prompt_ids[start + 1 : end + 1]

    def stop_reason(self) -> StopReason | None:
        """Whether the newest output token ends the request."""
        if self.output_ids[-1] in self.sampling.stop_token_ids:
            return StopReason.STOP
        if len(self.output_ids) >= self.sampling.max_tokens:
            return StopReason.LENGTH
        return None

    def newest_output(self, logprob: TokenLogprob | None, *, repeat: bool) -> TokenOutput:
        """The newest token for the router. `repeat`: it was sent before, by the other node."""
        scores, self.prompt_logprobs = self.prompt_logprobs, None
        cached, self.cached_tokens = self.cached_tokens, 0
        return TokenOutput(
            room=self.room,
            index=len(self.output_ids) - 1,
            token_ids=[self.output_ids[-1]],
            logprobs=None if logprob is None else [logprob],
            finish=None if repeat else self.stop_reason(),
            cached_tokens=cached,
            prompt_logprobs=scores,
        )
