"""Single tokens attend to their paged sequences: split over the keys, then merged.

Work comes as a list of *pieces*, each a range of one sequence's keys; a program has one piece and
one KV head, whose query heads are the rows of its products (padded to 16, which is what tensor
cores take; the keys, not the products, are what costs). A sequence of one piece is written at once.
Of several, each leaves its average and the logarithm of its total in the workspace, and a second
kernel merges them ("Flash-Decoding", Dao et al.).

What the list looks like is decided on the host (`common.engine.attention.work`), such that all
processors get about equally many keys however unequal the sequences are. Its length is all that a
launch depends on, so a captured CUDA graph takes a padded list.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.engine.kernels.flash import BOUNDED, LOG2_E, LOWEST, attend
from common.engine.kernels.tuning import INTERPRETED, DecodeConfig, dot_precision

PIECE_FIELDS = 5
"""int32 fields of a piece: row in the batch (negative: no piece), slot, first key, key behind the
last, place in the workspace (negative: the sequence has no other piece)."""
MERGE_FIELDS = 3
"""int32 fields of a merge: row in the batch, first place in the workspace, number of pieces. With
one piece nothing is to be merged; with none (padding) the row becomes zero."""
MIN_ROWS = 16
MERGED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Workspace:
    """What pieces leave for the merge, float32."""

    averages: Tensor
    """[places, num_heads, head_dim]"""
    logarithms: Tensor
    """[places, num_heads]: of the totals, base 2."""

    @property
    def places(self) -> int:
        return self.averages.shape[0]

    @classmethod
    def empty(cls, places: int, num_heads: int, head_dim: int, device: torch.device) -> "Workspace":
        averages = torch.empty(places, num_heads, head_dim, device=device)
        return cls(averages, torch.empty(places, num_heads, device=device))


@triton.jit
def _decode_kernel(
    query_ptr, query_token_stride, query_head_stride, out_ptr, out_token_stride,
    averages_ptr, logarithms_ptr,
    pool_ptr, page_stride, part_stride, head_stride, token_stride,
    table_ptr, table_stride, pieces_ptr, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PIECE_FIELDS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    piece = pieces_ptr + tl.program_id(1) * PIECE_FIELDS
    batch_row = tl.load(piece).to(tl.int64)
    if batch_row < 0:
        return
    slot = tl.load(piece + 1).to(tl.int64)
    low = tl.load(piece + 2)
    high = tl.load(piece + 3)
    place = tl.load(piece + 4).to(tl.int64)
    row = tl.arange(0, BLOCK_ROWS)
    head = kv_head * GROUP + row
    column = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (row < GROUP)[:, None] & (column < HEAD_DIM)
    at = query_ptr + batch_row * query_token_stride + (head * query_head_stride)[:, None] + column
    q = tl.load(at, mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    acc, peak, total = attend(
        tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32),
        tl.full([BLOCK_ROWS], LOWEST, tl.float32),
        tl.zeros([BLOCK_ROWS], tl.float32),
        q, row, low // BLOCK_KEYS * BLOCK_KEYS, high, low, high,
        pool_ptr + kv_head * head_stride, part_stride, page_stride, token_stride,
        table_ptr + slot * table_stride, scale,
        HEAD_DIM, PAGE_SIZE, 0, BLOCK_KEYS, BLOCK_DIM, BOUNDED, PRECISION, UPCAST,
    )  # fmt: skip
    average = acc / total[:, None]
    if place < 0:
        out = out_ptr + batch_row * out_token_stride + (head * HEAD_DIM)[:, None] + column
        tl.store(out, average.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        at_head = place * NUM_HEADS + head
        tl.store(averages_ptr + (at_head * HEAD_DIM)[:, None] + column, average, mask=mask)
        tl.store(logarithms_ptr + at_head, peak + tl.log2(total), mask=row < GROUP)


@triton.jit
def _merge_kernel(
    out_ptr, out_token_stride, averages_ptr, logarithms_ptr, merges_ptr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MERGE_FIELDS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr, BLOCK_DIM: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    merge = merges_ptr + tl.program_id(1) * MERGE_FIELDS
    count = tl.load(merge + 2)
    if count == 1:
        return
    batch_row = tl.load(merge).to(tl.int64)
    place = tl.load(merge + 1).to(tl.int64)
    column = tl.arange(0, BLOCK_DIM)
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    peak = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, count, BLOCK_PIECES):
        number = first + tl.arange(0, BLOCK_PIECES)
        at = (place + number) * NUM_HEADS + head
        logarithm = tl.load(logarithms_ptr + at, mask=number < count, other=float("-inf"))
        average = tl.load(
            averages_ptr + (at * HEAD_DIM)[:, None] + column[None, :],
            mask=(number < count)[:, None] & (column < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(logarithm, 0))
        weight = tl.exp2(logarithm - higher)
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade + tl.sum(average * weight[:, None], 0)
        peak = higher
    if count > 0:
        acc = acc / total
    out = out_ptr + batch_row * out_token_stride + head * HEAD_DIM + column
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def decode_attention(
    query: Tensor,
    pool: Tensor,
    page_table: Tensor,
    pieces: Tensor,
    merges: Tensor | None,
    *,
    out: Tensor,
    workspace: Workspace,
    config: DecodeConfig,
) -> None:
    """Write the attention of single tokens into their rows of `out`; other rows stay.

    `query`, `pool`, `page_table` and `out` are as in `prefill_attention`; a window is in the
    pieces' first keys. `pieces` [pieces, PIECE_FIELDS] and `merges` [sequences, MERGE_FIELDS] are
    int32; without `merges` no sequence has more than one piece, and none is padding.
    """
    _, num_heads, head_dim = query.shape
    _, _, num_kv_heads, page_size, _ = pool.shape
    assert query.stride(2) == pool.stride(4) == out.stride(1) == 1, "head_dim must be dense"
    assert query.dtype == pool.dtype, f"{query.dtype} cannot attend to a pool of {pool.dtype}"
    group = num_heads // num_kv_heads
    block_dim = max(16, triton.next_power_of_2(head_dim))
    _decode_kernel[num_kv_heads, pieces.shape[0]](
        query, query.stride(0), query.stride(1), out, out.stride(0),
        workspace.averages, workspace.logarithms,
        pool, pool.stride(0), pool.stride(1), pool.stride(2), pool.stride(3),
        page_table, page_table.stride(0), pieces, head_dim**-0.5 * LOG2_E,
        NUM_HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
        PIECE_FIELDS=PIECE_FIELDS, BLOCK_ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
        BLOCK_KEYS=config.block_keys, BLOCK_DIM=block_dim,
        PRECISION=dot_precision(query.dtype), UPCAST=INTERPRETED,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if merges is not None:
        _merge_kernel[num_heads, merges.shape[0]](
            out, out.stride(0), workspace.averages, workspace.logarithms, merges,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, MERGE_FIELDS=MERGE_FIELDS,
            BLOCK_PIECES=MERGED_AT_ONCE, BLOCK_DIM=block_dim, LOWEST=LOWEST.value,
            num_warps=2,
        )  # fmt: skip
