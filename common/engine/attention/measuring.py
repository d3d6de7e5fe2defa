"""Which launch configurations of attention are fastest on this card, measured on the node's pool.

Takes a minute, most of it compilation, so it is done only when asked for; what it finds is kept
(`ChoiceFile`) and used by every later start.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from common.engine.attention.base import AttentionBatch, Span
from common.engine.attention.triton_backend import TritonAttention
from common.engine.kernels.tuning import (
    DOES_NOT_FIT,
    INTERPRETED,
    AttentionTuning,
    Card,
    ChoiceFile,
    Config,
    DecodeConfig,
    PrefillConfig,
    choice_key,
    fastest,
)
from common.kv_cache.storage import PagedKVCache

Stopwatch = Callable[[Callable[[], None]], float]
"""Seconds of one call, of several."""

PREFILL_TOKENS = 2048
PREFILL_PREFIX = 4096
DECODE_BATCH = 32
DECODE_CONTEXT = 4096
REPETITIONS = 20

log = logging.getLogger(__name__)


def attention_tuning(
    cache: PagedKVCache, num_heads: int, file: Path | None, *, measure: bool
) -> AttentionTuning:
    """What `file` has for this card and model; what it lacks is measured (and kept) or a default.

    With `measure` the pool must not be in use yet: its contents are read. Under the interpreter
    nothing is ever measured.
    """
    group = num_heads // cache.num_kv_heads
    card = Card.of(cache.device)
    tuning = AttentionTuning.default(card, cache.head_dim, group, cache.dtype)
    if file is None:
        return tuning
    choices = ChoiceFile(file)
    keys = [
        choice_key(card, kernel, cache.head_dim, group, cache.page_size, cache.dtype)
        for kernel in ("prefill", "decode")
    ]
    prefill = choices.get(keys[0], PrefillConfig)
    decode = choices.get(keys[1], DecodeConfig)
    if measure and not INTERPRETED:
        bench = Bench(cache, num_heads, tuning, cuda_stopwatch)
        prefill, decode = prefill or bench.prefill(), decode or bench.decode()
        choices.put(keys[0], prefill)
        choices.put(keys[1], decode)
        log.info("measured %s and %s", prefill, decode)
    return replace(tuning, prefill=prefill or tuning.prefill, decode=decode or tuning.decode)


def cuda_stopwatch(call: Callable[[], None]) -> float:
    """Mean of several calls on the current stream, after two that are not counted."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    for _ in range(2):
        call()
    begin.record()
    for _ in range(REPETITIONS):
        call()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / REPETITIONS


@dataclass(frozen=True)
class Bench:
    """Measures candidates on sequences as long as the pool allows, a different layer each time, so
    that none finds its keys in the card's cache."""

    cache: PagedKVCache
    num_heads: int
    tuning: AttentionTuning
    stopwatch: Stopwatch

    def prefill(self) -> PrefillConfig:
        new = min(PREFILL_TOKENS, self._capacity // 2)
        spans = [Span(0, min(PREFILL_PREFIX, self._capacity - new), new)]
        default = self.tuning.prefill
        rows, keys = default.block_rows, default.block_keys
        candidates = [
            replace(default, block_rows=r, block_keys=k, num_warps=w, num_stages=s)
            for r, w in ((rows, 8), (rows, 4), (rows // 2, 4))
            for k, s in itertools.product((keys // 2, keys, 2 * keys), (2, 3, 4))
            if k >= 16 and r >= max(16, self._group)
        ]
        return self._fastest(
            [default, *candidates], spans, lambda c: replace(self.tuning, prefill=c)
        )

    def decode(self) -> DecodeConfig:
        batch = min(DECODE_BATCH, self.cache.num_pages)
        context = min(DECODE_CONTEXT, self._capacity // batch)
        spans = [Span(slot, context - 1, 1) for slot in range(batch)]
        default = self.tuning.decode
        candidates = [
            replace(default, block_keys=k, num_warps=w, num_stages=s, resident=n)
            for k, w, s, n in itertools.product(
                (default.block_keys // 2, default.block_keys), (2, 4), (3, 4), (2, 3, 4)
            )
            if k >= 16
        ]
        return self._fastest(
            [default, *candidates], spans, lambda c: replace(self.tuning, decode=c)
        )

    @property
    def _group(self) -> int:
        return self.num_heads // self.cache.num_kv_heads

    @property
    def _capacity(self) -> int:
        return self.cache.num_pages * self.cache.page_size

    def _fastest(
        self,
        candidates: Sequence[Config],
        spans: Sequence[Span],
        tuned: Callable[[Config], AttentionTuning],
    ) -> Config:
        """The first candidate is the default, which is known to run."""
        cache = self.cache
        batch = _batch(cache, spans)
        shape = (len(batch.slots), self.num_heads, cache.head_dim)
        query = torch.randn(shape, device=cache.device).to(cache.dtype)
        out = query.new_empty(shape[0], self.num_heads * cache.head_dim)
        turns = itertools.cycle(range(cache.num_layers))

        def seconds(candidate: Config) -> float | None:
            attention = TritonAttention(
                cache, self.num_heads, (None,) * cache.num_layers, tuning=tuned(candidate)
            )
            metadata = attention.plan(batch)
            try:
                return self.stopwatch(lambda: attention.attend(next(turns), query, metadata, out))
            except DOES_NOT_FIT:
                return None

        return fastest(candidates, seconds) or candidates[0]


def _batch(cache: PagedKVCache, spans: Sequence[Span]) -> AttentionBatch:
    """Sequences in pages of the pool that lie in no order."""
    order = torch.randperm(cache.num_pages, device=cache.device)
    pages = cache.num_pages // len(spans)
    table = order[: len(spans) * pages].view(len(spans), pages)
    slots = [span.slot for span in spans for _ in range(span.length)]
    positions = [p for span in spans for p in range(span.start, span.start + span.length)]
    return AttentionBatch(spans, table, _integers(slots, cache), _integers(positions, cache))


def _integers(values: Sequence[int], cache: PagedKVCache) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=cache.device)
