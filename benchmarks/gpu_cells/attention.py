"""Attention kernels alone, in a pool laid out as a node's: pages over all layers of the model.

Layers take turns, so that no repetition finds its keys in the card's cache.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_cells.counts import (
    HeadShape,
    decode_attention_bytes,
    kv_bytes_per_token,
    prefill_attention_flops,
)
from benchmarks.gpu_cells.figures import Figure, Target
from benchmarks.gpu_cells.scale import Cells, Measure, Scale, Setting
from benchmarks.gpu_cells.stopwatch import Work
from common.engine.attention.base import AttentionBatch, Span
from common.kv_cache.storage import PagedKVCache

DECODE_TARGET = Target("at least", 0.80)
PREFILL_TARGET = Target("at least", 0.55)
MEMORY_SHARE = 0.4
"""Of the card's free memory that a pool may take; where that is too little, fewer layers do."""


def cells(scale: Scale) -> Cells:
    decodes = {decode_name(*pair): _decode_cell(*pair) for pair in scale.decode}
    prefills = {prefill_name(*pair): _prefill_cell(*pair) for pair in scale.prefill}
    return {**decodes, **prefills}


def decode_name(batch: int, context: int) -> str:
    return f"decode attention, batch {batch}, context {context}"


def prefill_name(tokens: int, prefix: int) -> str:
    return f"prefill attention, {tokens} tokens, prefix {prefix}"


def _decode_cell(batch: int, context: int) -> Measure:
    return lambda setting, allowance_s: _decode(setting, batch, context, allowance_s)


def _prefill_cell(tokens: int, prefix: int) -> Measure:
    return lambda setting, allowance_s: _prefill(setting, tokens, prefix, allowance_s)


def _decode(setting: Setting, batch: int, context: int, allowance_s: float) -> Mapping[str, Figure]:
    heads = HeadShape.of(setting.scale.big)
    contexts = [context] * batch
    work = Work(num_bytes=decode_attention_bytes(heads, contexts, setting.dtype.itemsize))
    made = prepare(setting, [(context - 1, 1)] * batch)
    times = setting.stopwatch.on_device(made.attend, work, allowance_s, setting.scale.repetitions)
    figure = Figure(
        unit="GB/s",
        values=[work.num_bytes / seconds / 1e9 for seconds in times],
        bound=setting.rates.copy / 1e9 if setting.rates else None,
        bound_name="copy",
        target=DECODE_TARGET,
        note=made.note,
    )
    return {decode_name(batch, context): figure}


def _prefill(
    setting: Setting, tokens: int, prefix: int, allowance_s: float
) -> Mapping[str, Figure]:
    heads = HeadShape.of(setting.scale.big)
    chunks = [(prefix, tokens)]
    work = Work(flops=prefill_attention_flops(heads, chunks))
    made = prepare(setting, chunks)
    times = setting.stopwatch.on_device(made.attend, work, allowance_s, setting.scale.repetitions)
    figure = Figure(
        unit="TFLOP/s",
        values=[work.flops / seconds / 1e12 for seconds in times],
        bound=setting.rates.matrix / 1e12 if setting.rates else None,
        bound_name="matrix",
        target=PREFILL_TARGET,
        note=made.note,
    )
    return {prefill_name(tokens, prefix): figure}


@dataclass(frozen=True, slots=True)
class Prepared:
    """Something to measure, and what to say of it."""

    attend: Callable[[], Tensor]
    note: str


def prepare(setting: Setting, chunks: Sequence[tuple[int, int]]) -> Prepared:
    """What attends once, each time in the next layer, to sequences of (start, new tokens)."""
    from common.engine.attention.triton_backend import TritonAttention

    spec, page_size, device = setting.scale.big, setting.scale.page_size, setting.device
    pages = [-(-(start + length) // page_size) for start, length in chunks]
    page_bytes = kv_bytes_per_token(spec, setting.dtype.itemsize) // spec.num_layers * page_size
    layers = min(spec.num_layers, pool_bytes(device) // (sum(pages) * page_bytes))
    if layers < 1:
        raise MemoryError(f"{sum(pages)} pages do not fit into the card's memory for one layer")
    cache = PagedKVCache(
        num_pages=sum(pages),
        num_layers=layers,
        num_kv_heads=spec.num_kv_heads,
        page_size=page_size,
        head_dim=spec.head_dim,
        dtype=setting.dtype,
        device=device,
    )
    cache.tensor.normal_()
    backend = TritonAttention(cache, spec.num_heads, (None,) * layers)
    metadata = backend.plan(_batch(chunks, pages, device))
    tokens = sum(length for _, length in chunks)
    size = (tokens, spec.num_heads, spec.head_dim)
    query = torch.randn(size, device=device).to(setting.dtype)
    out = query.new_empty(tokens, spec.num_heads * spec.head_dim)
    turns = itertools.cycle(range(layers))

    def attend() -> Tensor:
        backend.attend(next(turns), query, metadata, out)
        return out

    dtype = str(setting.dtype).removeprefix("torch.")
    shape = f"{spec.num_heads} heads, {spec.num_kv_heads} KV heads, head_dim {spec.head_dim}"
    return Prepared(attend, f"{shape}, {dtype}, pages of {page_size} tokens, {layers} layers")


def pool_bytes(device: torch.device) -> int:
    """How large a pool may be."""
    if device.type != "cuda":
        return 1 << 30
    return int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE)


def _batch(
    chunks: Sequence[tuple[int, int]], pages: Sequence[int], device: torch.device
) -> AttentionBatch:
    """All pages of the pool, in no order."""
    order = torch.randperm(sum(pages), device=device)
    table = order.new_zeros(len(chunks), max(pages))
    for slot, part in enumerate(torch.split(order, list(pages))):
        table[slot, : len(part)] = part
    slots = [slot for slot, (_, length) in enumerate(chunks) for _ in range(length)]
    positions = [p for start, length in chunks for p in range(start, start + length)]
    return AttentionBatch(
        [Span(slot, start, length) for slot, (start, length) in enumerate(chunks)],
        table,
        torch.tensor(slots, device=device),
        torch.tensor(positions, device=device),
    )
