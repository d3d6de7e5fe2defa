"""What has kernels on a GPU, in torch and without looking at values: attention and draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.engine.attention.base import AttentionBatch, Rotation
from common.engine.attention.torch_backend import TorchAttention
from common.engine.ops import TorchOps
from common.engine.philox import uniform
from common.engine.rope import rotate_
from common.engine.sampler import GREEDY_TEMPERATURE, Draw
from common.kv_cache.storage import PagedKVCache
from common.messages import SamplingParams


@dataclass
class Buffers:
    """Metadata of single tokens that keeps its tensors."""

    page_table: Tensor
    slots: Tensor
    positions: Tensor
    lengths: Tensor
    """[rows] keys that each row attends to; none for padding. `plan` tells them, as a list."""


class CapturableTorchAttention:
    """Torch's own, and over `Buffers` one that does the same for whatever they hold."""

    def __init__(self, cache: PagedKVCache, num_heads: int, windows: Sequence[int | None]) -> None:
        self._plain = TorchAttention(cache, num_heads, windows, cache.dtype)
        self._cache = cache
        self._num_heads = num_heads
        self._windows = windows

    def warm_up(self) -> None:
        """Nothing is compiled here."""

    def decode_buffers(
        self, batch_size: int, page_table: Tensor, slots: Tensor, positions: Tensor
    ) -> Buffers:
        return Buffers(page_table, slots, positions, torch.zeros(batch_size, dtype=torch.int64))

    def plan(self, batch: AttentionBatch, into: Any = None) -> Any:
        if into is None:
            return self._plain.plan(batch)
        assert into.slots.data_ptr() == batch.slots.data_ptr()
        assert all(span.length == 1 for span in batch.spans)
        lengths = [span.start + 1 for span in batch.spans]
        into.lengths.copy_(torch.tensor(lengths + [0] * (len(into.lengths) - len(lengths))))
        return into

    def forward(self, layer: int, qkv: Tensor, rotation: Rotation, metadata: Any) -> Tensor:
        if not isinstance(metadata, Buffers):
            return self._plain.forward(layer, qkv, rotation, metadata)
        cache, count = self._cache, qkv.shape[0]
        rotate_(qkv[:, : self._num_heads + cache.num_kv_heads], *rotation)
        size = cache.page_size
        table = metadata.page_table.index_select(0, metadata.slots)
        page = table.gather(1, (metadata.positions // size)[:, None])[:, 0]
        index = cache.store_index(page, metadata.positions % size)
        cache.store(layer, index, qkv[:, self._num_heads :])
        gathered = cache.gather(layer, cache.gather_index(table), count)
        key = torch.arange(gathered.shape[3])
        hidden = key >= metadata.lengths[:, None]
        window = self._windows[layer]
        if window is not None:
            hidden = hidden | (key < metadata.lengths[:, None] - window)
        # What is hidden may be anybody's, and 0 * NaN is NaN.
        keys, values = gathered.masked_fill(hidden[None, :, None, :, None], 0.0).unbind(0)
        query = qkv[:, : self._num_heads].reshape(count, cache.num_kv_heads, -1, qkv.shape[-1])
        scores = query @ keys.transpose(-1, -2) / qkv.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(dim=-1)
        attended = weights.nan_to_num(0.0) @ values
        flat: Tensor = attended.reshape(count, -1)
        return flat


class TorchDraws:
    """`FusedDraws`: a tensor of tokens, and nothing looked at."""

    def __init__(self) -> None:
        self._slots: dict[int, SamplingParams] = {}

    def reset(self, slot: int, params: SamplingParams) -> None:
        self._slots[slot] = params

    def launch(self, logits: Tensor, draws: Sequence[Draw], wanted: Sequence[bool]) -> Tensor:
        tokens = torch.zeros(len(draws), dtype=torch.int64)
        for row, draw in enumerate(draws):
            if wanted[row]:
                tokens[row] = drawn(logits[row].float(), self._slots[draw.slot], draw.index)
        return tokens


def drawn(logits: Tensor, params: SamplingParams, index: int) -> Tensor:
    """As `sampler.draw`."""
    if params.temperature < GREEDY_TEMPERATURE:
        return logits.argmax()
    logits = logits / params.temperature
    values, ids = logits, torch.arange(logits.shape[0])
    if params.top_k > 0 or params.top_p < 1.0:
        values, ids = logits.sort(descending=True)
        if params.top_k > 0:
            values, ids = values[: params.top_k], ids[: params.top_k]
    if params.min_p > 0.0:
        least = values.max() + torch.tensor(params.min_p).log()
        values = values.masked_fill(values < least, float("-inf"))
    if params.top_p < 1.0:
        mass = values.double().softmax(dim=-1).cumsum(dim=-1).roll(1)
        mass[0] = 0.0
        values = values.masked_fill(mass >= params.top_p, float("-inf"))
    cumulative = values.double().softmax(dim=-1).cumsum(dim=-1)
    number = uniform(params.seed, params.choice, index)
    position = torch.searchsorted(cumulative, number * cumulative[-1:], right=True)
    return ids[position.clamp_max(len(ids) - 1)][0]


class DrawingOps(TorchOps):
    """Torch's, and draws that stay on the device."""

    def fused_draws(self, vocab_size: int) -> TorchDraws:
        return TorchDraws()
