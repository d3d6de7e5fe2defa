"""Attention in plain torch: the CPU path, and the oracle for every other backend.

A span of several tokens (a prefill chunk) gathers its sequence's pages once a layer and attends in
tiles of queries, each against no more keys than its last query may see. Single tokens (decode) of
sequences with about equally many pages are gathered and computed together; the query heads that
share a KV head are the rows of one small product, so keys are never repeated. Pages outside a
layer's sliding window are not read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.engine.attention.base import AttentionBatch, Rotation, Span
from common.engine.rope import rotate_
from common.kv_cache.storage import PagedKVCache

QUERY_TILE = 64
"""Queries a product; smaller wastes less work above the diagonal, larger calls torch less often."""
MAX_PADDED_PAGES = 8
"""Padding a decode group may carry; reading 8 pages costs about as much as another group."""


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Queries [first, last) of the batch against keys [key_first, key_last) of the gathered."""

    first: int
    last: int
    key_first: int
    key_last: int
    mask: Tensor | None
    """[queries, keys], added to the scores; None where `causal` says it all."""
    causal: bool


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One span of several tokens."""

    gather: Tensor
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Single tokens that are computed together."""

    gather: Tensor
    num_sequences: int
    num_keys: int
    rows: Tensor | None
    """Where they stand in the batch; None if they are the batch, in order."""
    mask: Tensor | None
    """[sequences, 1, query heads a KV head, keys], added to the scores; None hides nothing."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """What layers with the same window share."""

    chunks: tuple[ChunkPlan, ...]
    decodes: tuple[DecodePlan, ...]


@dataclass(frozen=True, slots=True)
class TorchMetadata:
    store: Tensor
    windows: dict[int | None, WindowPlan]


class TorchAttention:
    """`AttentionBackend` for one model and cache; `windows[layer]` as in `ModelSpec`."""

    def __init__(
        self, cache: PagedKVCache, num_heads: int, windows: Sequence[int | None], dtype: torch.dtype
    ) -> None:
        self._cache = cache
        self._num_heads = num_heads
        self._group = num_heads // cache.num_kv_heads
        self._windows = tuple(windows)
        self._dtype = dtype

    def plan(self, batch: AttentionBatch) -> TorchMetadata:
        size = self._cache.page_size
        pages = batch.page_table[batch.slots, batch.positions // size]
        return TorchMetadata(
            store=self._cache.store_index(pages, batch.positions % size),
            windows={window: self._plan_window(batch, window) for window in set(self._windows)},
        )

    def forward(
        self, layer: int, qkv: Tensor, rotation: Rotation, metadata: TorchMetadata
    ) -> Tensor:
        rotate_(qkv[:, : self._num_heads + self._cache.num_kv_heads], *rotation)
        query = qkv[:, : self._num_heads]
        self._cache.store(layer, metadata.store, qkv[:, self._num_heads :])
        plan = metadata.windows[self._windows[layer]]
        if not plan.chunks and len(plan.decodes) == 1 and plan.decodes[0].rows is None:
            return self._decode(layer, query, plan.decodes[0])
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for chunk in plan.chunks:
            self._prefill(layer, query, chunk, output)
        for decode in plan.decodes:
            rows = decode.rows
            assert rows is not None or query.shape[0] == decode.num_sequences
            if rows is None:
                output.copy_(self._decode(layer, query, decode))
            else:
                output[rows] = self._decode(layer, query[rows], decode)
        return output

    # ------------------------------------------------------------ compute

    def _prefill(self, layer: int, query: Tensor, plan: ChunkPlan, output: Tensor) -> None:
        keys, values = self._cache.gather(layer, plan.gather, 1).unbind(0)
        for tile in plan.tiles:
            attended = scaled_dot_product_attention(
                query[tile.first : tile.last].transpose(0, 1).unsqueeze(0),
                keys[:, :, tile.key_first : tile.key_last],
                values[:, :, tile.key_first : tile.key_last],
                attn_mask=tile.mask,
                is_causal=tile.causal,
                enable_gqa=self._group > 1,
            )
            output[tile.first : tile.last] = attended[0].transpose(0, 1).flatten(1)

    def _decode(self, layer: int, query: Tensor, plan: DecodePlan) -> Tensor:
        count = plan.num_sequences
        gathered = self._cache.gather(layer, plan.gather, count)
        keys, values = gathered.narrow(3, 0, plan.num_keys).unbind(0)
        grouped = query.view(count, self._cache.num_kv_heads, self._group, query.shape[-1])
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.mask)
        return attended.reshape(count, self._num_heads * query.shape[-1])

    # ------------------------------------------------------------ planning

    def _plan_window(self, batch: AttentionBatch, window: int | None) -> WindowPlan:
        chunks = []
        singles: list[tuple[int, Span]] = []
        offset = 0
        for span in batch.spans:
            if span.length == 1:
                singles.append((offset, span))
            else:
                chunks.append(self._plan_chunk(batch, span, offset, window))
            offset += span.length
        reads = [(row, span, self._pages_read(span, window)) for row, span in singles]
        groups = _group_by_pages(reads)
        alone = not chunks and len(groups) == 1
        if alone:
            groups = [reads]
        return WindowPlan(
            tuple(chunks),
            tuple(self._plan_decode(batch, group, window, alone) for group in groups),
        )

    def _pages_read(self, span: Span, window: int | None) -> range:
        """Logical pages that hold what the span's tokens may see."""
        size = self._cache.page_size
        first = 0 if window is None else max(0, span.start - window + 1) // size
        return range(first, (span.start + span.length - 1) // size + 1)

    def _plan_chunk(
        self, batch: AttentionBatch, span: Span, offset: int, window: int | None
    ) -> ChunkPlan:
        read = self._pages_read(span, window)
        base = read.start * self._cache.page_size
        pages = batch.page_table[span.slot, read.start : read.stop].unsqueeze(0)
        tiles = []
        for first in range(0, span.length, QUERY_TILE):
            last = min(first + QUERY_TILE, span.length)
            begin, end = span.start + first, span.start + last
            low = base if window is None else max(base, begin - window + 1)
            # torch aligns its own causal mask to the top left: right only without a prefix.
            causal = begin == low and (window is None or end - begin <= window)
            mask = None if causal else self._mask(batch, begin, end, low, window)
            tiles.append(
                QueryTile(offset + first, offset + last, low - base, end - base, mask, causal)
            )
        return ChunkPlan(self._cache.gather_index(pages), tuple(tiles))

    def _mask(
        self, batch: AttentionBatch, begin: int, end: int, low: int, window: int | None
    ) -> Tensor:
        device = batch.positions.device
        query = torch.arange(begin, end, device=device).unsqueeze(1)
        return self._hide(torch.arange(low, end, device=device), query, window)

    def _hide(self, key: Tensor, query: Tensor, window: int | None) -> Tensor:
        """0 where position `key` is visible from `query`, -inf elsewhere; the two broadcast."""
        hidden = key > query
        if window is not None:
            hidden = hidden | (key <= query - window)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _plan_decode(
        self,
        batch: AttentionBatch,
        group: Sequence[tuple[int, Span, range]],
        window: int | None,
        alone: bool,
    ) -> DecodePlan:
        size = self._cache.page_size
        most = max(len(read) for _, _, read in group)
        slots = [span.slot for _, span, _ in group]
        firsts = [read.start for _, _, read in group]
        device = batch.positions.device
        rows = None if alone else torch.tensor([row for row, _, _ in group], device=device)
        if len(group) == 1:
            _, span, read = group[0]
            pages = batch.page_table[span.slot, read.start : read.stop].unsqueeze(0)
            num_keys = span.start + 1 - read.start * size
            hides = window is not None and num_keys > window
        else:
            # A shorter sequence repeats its own last page: masked, and nobody else's data.
            last = torch.tensor([read.stop - 1 for _, _, read in group], device=device)
            first = torch.tensor(firsts, device=device)
            logical = (first[:, None] + torch.arange(most, device=device)).clamp_max(last[:, None])
            pages = batch.page_table[torch.tensor(slots, device=device)[:, None], logical]
            num_keys = max(span.start + 1 - read.start * size for _, span, read in group)
            hides = True
        mask = None
        if hides:
            position = torch.tensor([span.start for _, span, _ in group], device=device)
            key = torch.tensor(firsts, device=device)[:, None] * size
            key = key + torch.arange(num_keys, device=device)
            mask = self._hide(key, position[:, None], window)[:, None, None]
            mask = mask.expand(-1, -1, self._group, -1)
        return DecodePlan(self._cache.gather_index(pages), len(group), num_keys, rows, mask)


def _group_by_pages(
    reads: Sequence[tuple[int, Span, range]],
) -> list[Sequence[tuple[int, Span, range]]]:
    """Split by number of pages so that no group carries more padding than a group costs."""
    ordered = sorted(reads, key=lambda read: -len(read[2]))
    cuts = [0]
    padding = 0
    for index, (_, _, pages) in enumerate(ordered):
        padding += len(ordered[cuts[-1]][2]) - len(pages)
        if padding > MAX_PADDED_PAGES:
            cuts.append(index)
            padding = 0
    return [ordered[a:b] for a, b in pairwise([*cuts, len(ordered)])] if ordered else []
