"""Sequences in a paged pool in which everything that nobody may read is NaN, and their attention
in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.precision import DEVICE, normal, poisoned

LAYER = 1
"""Of two in the pool; the other stays NaN."""


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype


class Scene:
    """One slot for each of `contexts`, which are lengths in tokens; pages in random order.

    A slot's row of the page table ends with the id of a page that is all NaN, as far as the slot
    has no pages, and so does a page behind its last token.
    """

    def __init__(self, shape: Shape, contexts: Sequence[int], seed: int = 0) -> None:
        self.shape = shape
        heads, dim, size = shape.num_kv_heads, shape.head_dim, shape.page_size
        counts = [-(-context // size) for context in contexts]
        generator = torch.Generator().manual_seed(seed)
        ids = (torch.randperm(sum(counts), generator=generator) + 1).tolist()  # page 0: of nobody
        self.pool = poisoned(1 + sum(counts), 2, 2, heads, size, dim, dtype=shape.dtype)
        self.page_table = torch.zeros(len(contexts), max(counts) + 2, dtype=torch.int64)
        self.kv: list[Tensor] = []
        """Of each slot, [2, num_kv_heads, context, head_dim]."""
        for slot, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            pages = [ids.pop() for _ in range(count)]
            self.page_table[slot, :count] = torch.tensor(pages, dtype=torch.int64)
            kv = normal(2, heads, context, dim, dtype=shape.dtype, seed=seed + 100 + slot)
            self.kv.append(kv)
            for number, page in enumerate(pages):
                part = kv[:, :, number * size : (number + 1) * size]
                self.pool[page, LAYER, :, :, : part.shape[2]] = part
        self.page_table = self.page_table.to(DEVICE)

    @property
    def layer(self) -> Tensor:
        """[pages, 2, num_kv_heads, page_size, head_dim]."""
        return self.pool[:, LAYER]

    def queries(self, rows: int, seed: int = 7) -> Tensor:
        """[rows, num_heads, head_dim], a strided view as of a projection."""
        heads, dim = self.shape.num_heads, self.shape.head_dim
        wide = normal(
            rows, heads + 2 * self.shape.num_kv_heads, dim, dtype=self.shape.dtype, seed=seed
        )
        return wide[:, :heads]

    def attention(self, query: Tensor, slot: int, start: int, window: int | None) -> Tensor:
        """Of `query` [tokens, num_heads, head_dim] at positions from `start` on; float64
        [tokens, num_heads * head_dim]."""
        end = start + query.shape[0]
        keys, values = self.kv[slot][:, :, :end].double().unbind(0)
        return attention64(query, keys, values, start, window)


def attention64(
    query: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None
) -> Tensor:
    """Causal attention of [tokens, heads, dim] at `start` to [kv heads, keys, dim], in float64."""
    tokens, heads, dim = query.shape
    group = heads // keys.shape[0]
    keys, values = (part.double().repeat_interleave(group, 0) for part in (keys, values))
    scores = torch.einsum("thd,hkd->htk", query.double(), keys) * dim**-0.5
    position = torch.arange(start, start + tokens, device=query.device)[:, None]
    key = torch.arange(keys.shape[1], device=query.device)
    hidden = key > position
    if window is not None:
        hidden = hidden | (key <= position - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("htk,hkd->thd", weights, values).reshape(tokens, heads * dim)
