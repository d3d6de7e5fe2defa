"""Attention with Triton kernels: the CUDA path.

A step is, in each layer, one launch that rotates and stores, one for chunks of prompts, and one or
two for single tokens. Which of them, and over which lists, is planned on the host once a step and
sent to the device in one copy; what a kernel reads of the plan is a tensor.

For CUDA graphs `decode_buffers` gives metadata whose tensors keep their places, for batches of
single tokens of one padded size. Capture `forward` with it once; before each replay refill it with
`plan(batch, into=...)`. Rows beyond the batch's spans are padding: with negative slots they store
nothing, and their attention is zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from common.engine.attention.base import AttentionBatch, Rotation
from common.engine.attention.work import (
    Int32s,
    PlacedSpans,
    Split,
    pad,
    split_singles,
    tile_chunks,
)
from common.engine.kernels.decode_attention import decode_attention
from common.engine.kernels.merging import Workspace
from common.engine.kernels.prefill_attention import TILE_FIELDS, prefill_attention
from common.engine.kernels.store import rotate_and_store
from common.engine.kernels.tuning import FEW_TOKENS, AttentionTuning, Card
from common.kv_cache.storage import PagedKVCache


@dataclass(frozen=True, slots=True)
class WindowLists:
    """What layers with the same window share; None where there is nothing to launch."""

    tiles: Tensor | None
    tile_merges: Tensor | None
    pieces: Tensor | None
    piece_merges: Tensor | None


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    page_table: Tensor
    slots: Tensor
    positions: Tensor
    windows: Mapping[int | None, WindowLists]
    workspace: Workspace
    buffer: Tensor
    """Flat int32, on the device: what the lists are views of."""


class TritonAttention:
    """`AttentionBackend` for one model and cache; `windows[layer]` as in `ModelSpec`."""

    def __init__(
        self,
        cache: PagedKVCache,
        num_heads: int,
        windows: Sequence[int | None],
        dtype: torch.dtype | None = None,
        tuning: AttentionTuning | None = None,
    ) -> None:
        assert dtype in (None, cache.dtype), f"{dtype} cannot attend to a pool of {cache.dtype}"
        self._pools = [cache.tensor[:, layer] for layer in range(cache.num_layers)]
        self._num_heads = num_heads
        self._head_dim = cache.head_dim
        self._device = cache.device
        self._windows = tuple(windows)
        self._distinct_windows = tuple(dict.fromkeys(windows))
        group = num_heads // cache.num_kv_heads
        self.tuning = tuning or AttentionTuning.default(
            Card.of(cache.device), cache.head_dim, group, cache.dtype
        )
        prefill, decode = self.tuning.prefill, self.tuning.decode
        self._tile_tokens = prefill.tokens(group)
        programs = self.tuning.processors / cache.num_kv_heads
        self._split_tiles = Split(max(1, int(programs)), prefill.min_keys, prefill.block_keys)
        self._split = Split(
            max(1, int(programs * decode.resident)), decode.min_keys, decode.block_keys
        )
        self._workspace = self._new_workspace(self._split.programs)

    # ------------------------------------------------------------ planning

    def plan(self, batch: AttentionBatch, into: TritonMetadata | None = None) -> TritonMetadata:
        """Divide the step's work. With `into`, made by `decode_buffers`, refill that and return it:
        its tensors of slots and positions must be those of `batch`, all spans single tokens."""
        spans = PlacedSpans.of([(span.slot, span.start, span.length) for span in batch.spans])
        if into is not None:
            return self._refill(spans, batch, into)
        single = spans.lengths == 1
        chunks, singles = spans.where(~single), spans.where(single)
        arrays: list[Int32s | None] = []
        places = 0
        for window in self._distinct_windows:
            works = (
                tile_chunks(chunks, self._tile_tokens, window, self._split_tiles),
                split_singles(singles, window, self._split),
            )
            for work in works:
                arrays.append(work.entries if len(work.entries) else None)
                arrays.append(work.merges if work.is_split else None)
                places = max(places, work.num_places)
        if places > self._workspace.places:
            self._workspace = self._new_workspace(places)
        return self._metadata(batch, arrays, self._flat(arrays).to(self._device, non_blocking=True))

    def decode_buffers(
        self, batch_size: int, page_table: Tensor, slots: Tensor, positions: Tensor
    ) -> TritonMetadata:
        """Metadata for steps of up to `batch_size` single tokens that replay one captured graph.

        The three tensors are the caller's and read by the graph: `slots` and `positions`
        [batch_size], negative slots for rows that are padding. Make the largest first: smaller ones
        then share its workspace.
        """
        assert len(slots) == len(positions) == batch_size, "a slot and a position for each row"
        max_pieces = batch_size + self._split.programs
        if max_pieces > self._workspace.places:
            self._workspace = self._new_workspace(max_pieces)
        arrays = self._padded(PlacedSpans.of([]), batch_size)
        batch = AttentionBatch([], page_table, slots, positions)
        return self._metadata(batch, arrays, self._flat(arrays).to(self._device))

    def _refill(
        self, spans: PlacedSpans, batch: AttentionBatch, into: TritonMetadata
    ) -> TritonMetadata:
        assert (spans.lengths == 1).all(), "a graph computes single tokens"
        assert batch.slots.data_ptr() == into.slots.data_ptr(), "the graph reads other slots"
        assert batch.positions.data_ptr() == into.positions.data_ptr(), "and other positions"
        arrays = self._padded(spans, len(into.slots))
        into.buffer.copy_(self._flat(arrays), non_blocking=True)
        return into

    def _padded(self, spans: PlacedSpans, batch_size: int) -> list[Int32s | None]:
        """No tiles, and as many pieces and merges as a batch of that size may ever have."""
        arrays: list[Int32s | None] = []
        for window in self._distinct_windows:
            work = split_singles(spans, window, self._split)
            padded = pad(work, batch_size, batch_size + self._split.programs)
            arrays += [None, None, padded.entries, padded.merges]
        return arrays

    def _flat(self, arrays: Sequence[Int32s | None]) -> Tensor:
        """All in one tensor on the host, from where a copy to the device need not wait."""
        kept = [array.reshape(-1) for array in arrays if array is not None]
        flat = torch.from_numpy(np.concatenate(kept))
        return flat.pin_memory() if self._device.type == "cuda" else flat

    def _metadata(
        self, batch: AttentionBatch, arrays: Sequence[Int32s | None], buffer: Tensor
    ) -> TritonMetadata:
        """`arrays` are the fields of each window's `WindowLists`; `buffer` holds them in order."""
        ends = accumulate((0 if array is None else array.size for array in arrays), initial=0)
        views = [
            None if array is None else buffer[first:last].view(array.shape)
            for array, (first, last) in zip(arrays, pairwise(ends), strict=True)
        ]
        lists = [WindowLists(*views[at : at + 4]) for at in range(0, len(views), 4)]
        return TritonMetadata(
            batch.page_table,
            batch.slots,
            batch.positions,
            dict(zip(self._distinct_windows, lists, strict=True)),
            self._workspace,
            buffer,
        )

    def _new_workspace(self, places: int) -> Workspace:
        return Workspace.empty(places, self._num_heads, self._head_dim, self._device)

    # ------------------------------------------------------------ compute

    def forward(
        self, layer: int, qkv: Tensor, rotation: Rotation, metadata: TritonMetadata
    ) -> Tensor:
        rotate_and_store(
            qkv, rotation, self._pools[layer],
            metadata.page_table, metadata.slots, metadata.positions,
            config=self.tuning.store,
        )  # fmt: skip
        query = qkv[:, : self._num_heads]
        out = query.new_empty(query.shape[0], self._num_heads * self._head_dim)
        self.attend(layer, query, metadata, out)
        return out

    def attend(self, layer: int, query: Tensor, metadata: TritonMetadata, out: Tensor) -> None:
        """The second half of `forward`: `query` is rotated, keys and values are stored."""
        pool, table = self._pools[layer], metadata.page_table
        window = self._windows[layer]
        lists = metadata.windows[window]
        if lists.tiles is not None:
            prefill_attention(
                query, pool, table, lists.tiles, lists.tile_merges,
                out=out, workspace=metadata.workspace, window=window, config=self.tuning.prefill,
            )  # fmt: skip
        if lists.pieces is not None:
            decode_attention(
                query, pool, table, lists.pieces, lists.piece_merges,
                out=out, workspace=metadata.workspace, config=self.tuning.decode,
            )  # fmt: skip

    def warm_up(self) -> None:
        """Compile whatever a step may launch, or load it from Triton's cache, so that no request
        waits for it. Reads and writes no page."""
        lists = self._padded(PlacedSpans.of([]), 1)
        tile = np.zeros((1, TILE_FIELDS), dtype=np.int32)
        merges = lists[3]
        for at in range(0, len(lists), 4):
            lists[at : at + 2] = [tile, merges]
        for tokens in (1, FEW_TOKENS + 1):
            nobody = torch.full((tokens,), -1, device=self._device)
            table = nobody.new_zeros(1, 2)
            batch = AttentionBatch([], table, nobody, nobody)
            metadata = self._metadata(batch, lists, self._flat(lists).to(self._device))
            pool = self._pools[0]
            heads = self._num_heads + 2 * pool.shape[2]
            qkv = pool.new_zeros(tokens, heads, self._head_dim)
            row = pool.new_zeros(tokens, 1, self._head_dim)
            for window in self._distinct_windows:
                self.forward(self._windows.index(window), qkv, (row, row), metadata)
