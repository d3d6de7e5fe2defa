"""What adapters add to a product's output: for all rows, adapters and targets in two launches.

Rows are sorted by slot and cut into *tiles* of rows with one adapter each. `shrink` multiplies a
tile's x by the adapter's low-rank rows, for every target of the product; `expand` takes that up to
the targets' columns and adds it to y. Rows without an adapter are in no tile and are not touched; a
tile reads its own adapter's weights only, so that what overflows stays where it is.

The launches depend on shapes and on an upper bound of tiles, never on which adapters there are: an
unused tile counts no rows and its programs end at once. So both can be captured in a CUDA graph.
With few rows a program for each tile would read all of an adapter's `shrink` alone; there the
inner dimension is split, and `expand` adds the parts up, in one order.

After Punica (Chen et al., 2023) and S-LoRA (Sheng et al., 2023).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.engine.kernels.tuning import INTERPRETED

FEW_ROWS = 256
"""Up to so many rows of a batch, tiles are small and the inner dimension is split."""
SMALL_TILE, LARGE_TILE = 16, 64
SPLIT = 512
"""Of the inner dimension, what one program takes where it is split, at least."""
MAX_SPLITS = 8
BLOCK_INNER = 128
BLOCK_RANK = 32
BLOCK_OUT = 128


@dataclass(frozen=True)
class TargetTables:
    """Where weights are; the same for all products and layers, and at fixed addresses."""

    memory: Tensor
    """All of the pool's matrices, flat."""
    targets: Tensor
    """[layers, targets, 4] int64: where the target's `shrink` and `expand` begin in `memory`, its
    first column in its product, and how many columns it has."""
    slots: Tensor
    """[slots, 2 + layers] int32: an adapter's first rank row, its rank, and for each layer a bit
    for each target that it changes."""
    max_rank: int


@dataclass(frozen=True)
class Tiles:
    """Which rows of a batch belong together."""

    rows: Tensor
    """[adapted rows or more] int32: rows of the batch, those of one slot next to each other."""
    tiles: Tensor
    """[upper bound, 3] int32: slot, first place in `rows`, how many rows; 0 for an unused one."""
    size: int
    """Rows a tile has at most: `tile_size` of the batch."""


def tile_size(num_rows: int) -> int:
    """How `num_rows` are to be cut."""
    return SMALL_TILE if num_rows <= FEW_ROWS else LARGE_TILE


@triton.jit
def _tile(tiles, slots, rows, slot_stride, layer, target, SIZE: tl.constexpr):
    """(places in `rows`, rows of the batch, which of them count, first rank row, rank).

    The rank is 0 where there is nothing to do for this target.
    """
    entry = tiles + tl.program_id(0) * 3
    slot = tl.load(entry)
    count = tl.load(entry + 2)
    place = tl.load(entry + 1) + tl.arange(0, SIZE)
    real = tl.arange(0, SIZE) < count
    row = tl.load(rows + place, mask=real, other=0).to(tl.int64)
    held = slots + tl.maximum(slot, 0) * slot_stride
    changed = (tl.load(held + 2 + layer) >> target) & 1
    rank = tl.load(held + 1)
    return place, row, real, tl.load(held), tl.where((count > 0) & (changed > 0), rank, 0)


@triton.jit(do_not_specialize=["layer", "first_target", "num_rows"])
def _shrink_kernel(
    x, memory, targets, slots, rows, tiles, low,
    x_stride, slot_stride, target_stride, low_stride, inner, layer, first_target, num_rows, split,
    SIZE: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_INNER: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    target = tl.program_id(1)
    place, row, real, first, rank = _tile(
        tiles, slots, rows, slot_stride, layer, first_target + target, SIZE
    )
    begin = tl.load(targets + layer * target_stride + (first_target + target) * 4)
    shrink = memory + tl.multiple_of(begin, 8)
    # [splits, targets of this product, places, ranks]
    part = (tl.program_id(2) * tl.num_programs(1) + target).to(tl.int64) * num_rows * low_stride
    stop = tl.minimum((tl.program_id(2) + 1) * split, inner)
    for begin_rank in range(0, rank, BLOCK_RANK):
        ranks = begin_rank + tl.arange(0, BLOCK_RANK)
        held = ranks < rank
        total = tl.zeros((SIZE, BLOCK_RANK), dtype=tl.float32)
        for start in range(tl.program_id(2) * split, stop, BLOCK_INNER):
            column = start + tl.arange(0, BLOCK_INNER)
            inside = column < stop
            left = tl.load(
                x + row[:, None] * x_stride + column[None, :],
                mask=real[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            right = tl.load(
                shrink + (first + ranks)[None, :].to(tl.int64) * inner + column[:, None],
                mask=held[None, :] & inside[:, None], other=0.0,
            )  # fmt: skip
            left = left.to(right.dtype)
            if UPCAST:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total += tl.dot(left, right, input_precision=PRECISION)
        out = low + part + place[:, None] * low_stride + ranks[None, :]
        tl.store(out, total, mask=real[:, None] & held[None, :])


@triton.jit(do_not_specialize=["layer", "first_target", "num_rows"])
def _expand_kernel(
    y, memory, targets, slots, rows, tiles, low,
    y_stride, slot_stride, target_stride, low_stride, layer, first_target, num_targets, num_rows,
    splits,
    SIZE: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    target = tl.program_id(1)
    entry = targets + layer * target_stride + (first_target + target) * 4
    width = tl.load(entry + 3).to(tl.int32)
    column = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = column < width
    place, row, real, first, rank = _tile(
        tiles, slots, rows, slot_stride, layer, first_target + target, SIZE
    )
    rank = tl.where(tl.program_id(2) * BLOCK_OUT < width, rank, 0)
    if rank > 0:
        expand = memory + tl.multiple_of(tl.load(entry + 1), 8)
        gain = tl.zeros((SIZE, BLOCK_OUT), dtype=tl.float32)
        for begin_rank in range(0, rank, BLOCK_RANK):
            ranks = begin_rank + tl.arange(0, BLOCK_RANK)
            held = ranks < rank
            left = tl.zeros((SIZE, BLOCK_RANK), dtype=tl.float32)
            for split in range(splits):
                part = (split * num_targets + target).to(tl.int64) * num_rows * low_stride
                left += tl.load(
                    low + part + place[:, None] * low_stride + ranks[None, :],
                    mask=real[:, None] & held[None, :], other=0.0,
                )  # fmt: skip
            right = tl.load(
                expand + (first + ranks)[:, None].to(tl.int64) * width + column[None, :],
                mask=held[:, None] & inside[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            gain += tl.dot(left, right, input_precision=PRECISION)
        out = y + row[:, None] * y_stride + tl.load(entry + 2) + column[None, :]
        mask = real[:, None] & inside[None, :]
        total = tl.load(out, mask=mask, other=0.0).to(tl.float32) + gain
        tl.store(out, total.to(y.dtype.element_ty), mask=mask)


def add_lora(
    x: Tensor,
    y: Tensor,
    tables: TargetTables,
    tiles: Tiles,
    *,
    layer: int,
    first_target: int,
    num_targets: int,
    widest: int,
) -> None:
    """Add to `y` [rows, out] what adapters change of a product of `x` [rows, inner], in place.

    The product's targets are `num_targets` from `first_target` on; the widest has `widest` columns.
    Sums are float32 and `y` is rounded once. Weights of 16 bits are multiplied with an intermediate
    result of TF32's 11 bits, float32 ones exactly.
    """
    num_rows, inner = x.shape
    assert x.stride(1) == 1
    assert y.stride(1) == 1
    few = num_rows <= FEW_ROWS
    splits = min(MAX_SPLITS, triton.cdiv(inner, SPLIT)) if few else 1
    split = triton.cdiv(triton.cdiv(inner, splits), BLOCK_INNER) * BLOCK_INNER
    wide = tables.memory.dtype is torch.float32
    low_shape = (splits, num_targets, num_rows, tables.max_rank)
    low = torch.empty(low_shape, dtype=torch.float32, device=x.device)
    shared = (tables.slots.stride(0), tables.targets.stride(0), low.stride(2))
    given = (tables.memory, tables.targets, tables.slots, tiles.rows, tiles.tiles, low)
    precision = "ieee" if wide else "tf32"
    bound, warps = tiles.tiles.shape[0], 4 if tiles.size == SMALL_TILE else 8
    _shrink_kernel[(bound, num_targets, splits)](
        x, *given, x.stride(0), *shared, inner, layer, first_target, num_rows, split,
        SIZE=tiles.size, BLOCK_RANK=BLOCK_RANK, BLOCK_INNER=BLOCK_INNER,
        PRECISION=precision, UPCAST=INTERPRETED, num_warps=warps,
    )  # fmt: skip
    _expand_kernel[(bound, num_targets, triton.cdiv(widest, BLOCK_OUT))](
        y, *given, y.stride(0), *shared, layer, first_target, num_targets, num_rows, splits,
        SIZE=tiles.size, BLOCK_RANK=BLOCK_RANK, BLOCK_OUT=BLOCK_OUT, PRECISION=precision,
        num_warps=warps,
    )  # fmt: skip
