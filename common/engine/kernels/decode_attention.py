"""Single tokens attend to their paged sequences: split over the keys, then merged.

Work comes as a list of *pieces*, each a range of one sequence's keys; a program has one piece and
one KV head, whose query heads are the rows of its products (padded to 16, which is what tensor
cores take; the keys, not the products, are what costs). A sequence of one piece is written at once,
several are merged by a second kernel.

What the list looks like is decided on the host (`common.engine.attention.work`), such that all
processors get about equally many keys however unequal the sequences are. Its length is all that a
launch depends on, so a captured CUDA graph takes a padded list.
"""

import triton
import triton.language as tl
from torch import Tensor

from common.engine.kernels.flash import BOUNDED, LOG2_E, LOWEST, attend
from common.engine.kernels.merging import Workspace, finish, merge
from common.engine.kernels.tuning import INTERPRETED, DecodeConfig, dot_precision

PIECE_FIELDS = 5
"""int32 fields of a piece: row in the batch (negative: no piece), slot, first key, key behind the
last, place in the workspace (negative: the sequence has no other piece)."""
MIN_ROWS = 16


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["pieces_ptr", "table_ptr"]
)
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
    out = out_ptr + batch_row * out_token_stride + (head * HEAD_DIM)[:, None] + column
    finish(
        acc, peak, total, place, out, averages_ptr, logarithms_ptr, place * NUM_HEADS + head,
        mask, row < GROUP, column, HEAD_DIM,
    )  # fmt: skip


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
    pieces' first keys. `pieces` [pieces, PIECE_FIELDS] and `merges` [rows, MERGE_FIELDS] are int32;
    without `merges` no sequence has more than one piece, and no row is padding.
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
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if merges is not None:
        merge(out, workspace, merges)
