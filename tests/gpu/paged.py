"""Sequences in a paged pool, with all around them poisoned, and attention to them in float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.attention.base import AttentionBatch, Span
from common.kv_cache.storage import PagedKVCache

LAYERS, LAYER = 3, 1
"""The layer that is tested has others before and behind it."""
QUERIES_AT_ONCE = 128
"""Of a reference: its scores are float64."""


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16

    def __str__(self) -> str:
        return f"{self.num_heads}:{self.num_kv_heads}x{self.head_dim}"


@dataclass(frozen=True, slots=True)
class Sequences:
    """`keys[i]` and `values[i]` are [contexts[i], num_kv_heads, head_dim], as they are in the
    pool; `page_table` [sequences, pages] names its pages, which are in no order."""

    cache: PagedKVCache
    page_table: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def batch(self, spans: Sequence[tuple[int, int]]) -> AttentionBatch:
        """New tokens as (start, length) of each sequence."""
        device = self.cache.device
        slots = [slot for slot, (_, length) in enumerate(spans) for _ in range(length)]
        positions = [p for start, length in spans for p in range(start, start + length)]
        return AttentionBatch(
            [Span(slot, start, length) for slot, (start, length) in enumerate(spans)],
            self.page_table,
            torch.tensor(slots, device=device),
            torch.tensor(positions, device=device),
        )


def make_sequences(
    shape: Shape, contexts: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Sequences:
    """Random sequences of these lengths, in `LAYER` of a pool that is NaN everywhere else, also
    behind a sequence's last token in its last page."""
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-context // shape.page_size) for context in contexts]
    num_pages = sum(counts) + 2
    cache = PagedKVCache(
        num_pages=num_pages,
        num_layers=LAYERS,
        num_kv_heads=shape.num_kv_heads,
        page_size=shape.page_size,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=device,
    )
    cache.tensor.fill_(float("nan"))
    order = torch.randperm(num_pages, generator=generator, device=device)
    table = order.new_zeros(len(contexts), max(counts))
    keys, values = [], []
    first = 0
    for slot, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        pages = order[first : first + count]
        table[slot, :count] = pages
        first += count
        size = (2, context, shape.num_kv_heads, shape.head_dim)
        kv = torch.randn(size, generator=generator, device=device).to(dtype)
        padded = kv.new_full((2, count * shape.page_size, *size[2:]), float("nan"))
        padded[:, :context] = kv
        in_pages = padded.view(2, count, shape.page_size, *size[2:]).permute(1, 0, 3, 2, 4)
        cache.tensor[pages, LAYER] = in_pages
        keys.append(kv[0])
        values.append(kv[1])
    return Sequences(cache, table, tuple(keys), tuple(values))


def random_queries(
    shape: Shape, tokens: int, dtype: torch.dtype, device: torch.device, seed: int = 1
) -> Tensor:
    """[tokens, num_heads, head_dim], a view with strides of its own; some heads attend to few keys
    and some to all."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (tokens, shape.num_heads + 3, shape.head_dim)
    queries = torch.randn(size, generator=generator, device=device)
    sharpness = torch.linspace(0.2, 3.0, size[1], device=device)[:, None]
    return (queries * sharpness).to(dtype)[:, : shape.num_heads]


def attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None
) -> Tensor:
    """Float64 attention of `query` [tokens, num_heads, head_dim] at positions from `start` on to
    `keys`, `values` [start + tokens, num_kv_heads, head_dim]; as the query is shaped."""
    tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.double().view(tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    wide_keys, wide_values = keys.double(), values.double()
    position = torch.arange(start, start + tokens, device=query.device)
    parts = []
    for first in range(0, tokens, QUERIES_AT_ONCE):
        mine = position[first : first + QUERIES_AT_ONCE]
        low = 0 if window is None else max(0, int(mine[0]) - window + 1)
        high = int(mine[-1]) + 1
        key = torch.arange(low, high, device=query.device)
        hidden = key[None, :] > mine[:, None]
        if window is not None:
            hidden |= key[None, :] <= mine[:, None] - window
        part = grouped[first : first + QUERIES_AT_ONCE]
        scores = torch.einsum("tkgd,skd->kgts", part, wide_keys[low:high]) / math.sqrt(head_dim)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        parts.append(torch.einsum("kgts,skd->tkgd", weights, wide_values[low:high]))
    return torch.cat(parts).reshape(tokens, num_heads, head_dim)
