"""Chunks of prompts attend to their paged prefix and to themselves.

A program has a *tile*: the queries of a few consecutive tokens of one sequence, times the query
heads that share one KV head, so that a key is read once for all of them. Row r of the tile is token
r // GROUP and head r % GROUP. Keys are read from the pool alone: the chunk's own are there already.

    keys   0        low                                   position          position + count
           │ unseen  │ window's edge │ seen by all rows      │ diagonal          │ unseen
                     └── masked ─────┴── no masks ───────────┴── masked ─────────┘

Keys outside [low, position + count) are not read. Where tiles are few for a card they are divided
over their keys too, and merged as in decode.
"""

import triton
import triton.language as tl
from torch import Tensor

from common.engine.kernels.flash import CAUSAL, LOG2_E, LOWEST, UNMASKED, attend
from common.engine.kernels.merging import Workspace, finish, merge
from common.engine.kernels.tuning import INTERPRETED, PrefillConfig, dot_precision

TILE_FIELDS = 7
"""int32 fields of a tile: first row in the batch, number of tokens, slot, first token's position,
first key, key behind the last, place in the workspace of the first token (negative: all that its
tokens see is in this tile)."""


@triton.jit
def _attend_tile(
    q, query_position, position, count, low, high,
    pool, part_stride, page_stride, token_stride, table, scale,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """(acc, peak, total) of one tile's queries over keys [low, high)."""
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    peak = tl.full([BLOCK_ROWS], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    full = low // BLOCK_KEYS * BLOCK_KEYS
    if WINDOW > 0:
        edge = tl.cdiv(tl.maximum(position + count - WINDOW, 0), BLOCK_KEYS) * BLOCK_KEYS
        edge = tl.maximum(edge, full)
        acc, peak, total = attend(
            acc, peak, total, q, query_position, full, tl.minimum(edge, high), low, high,
            pool, part_stride, page_stride, token_stride, table, scale,
            HEAD_DIM, PAGE_SIZE, WINDOW, BLOCK_KEYS, BLOCK_DIM, CAUSAL, PRECISION, UPCAST,
        )  # fmt: skip
        full = edge
    diagonal = tl.maximum((position + 1) // BLOCK_KEYS * BLOCK_KEYS, full)
    acc, peak, total = attend(
        acc, peak, total, q, query_position, full, tl.minimum(diagonal, high), low, high,
        pool, part_stride, page_stride, token_stride, table, scale,
        HEAD_DIM, PAGE_SIZE, WINDOW, BLOCK_KEYS, BLOCK_DIM, UNMASKED, PRECISION, UPCAST,
    )  # fmt: skip
    return attend(
        acc, peak, total, q, query_position, diagonal, high, low, high,
        pool, part_stride, page_stride, token_stride, table, scale,
        HEAD_DIM, PAGE_SIZE, WINDOW, BLOCK_KEYS, BLOCK_DIM, CAUSAL, PRECISION, UPCAST,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tiles_ptr", "table_ptr"]
)
def _prefill_kernel(
    query_ptr, query_token_stride, query_head_stride, out_ptr, out_token_stride,
    averages_ptr, logarithms_ptr,
    pool_ptr, page_stride, part_stride, head_stride, token_stride,
    table_ptr, table_stride, tiles_ptr, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE_FIELDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    tile = tiles_ptr + tl.program_id(1) * TILE_FIELDS
    batch_row = tl.load(tile)
    count = tl.load(tile + 1)
    slot = tl.load(tile + 2).to(tl.int64)
    position = tl.load(tile + 3)
    place = tl.load(tile + 6).to(tl.int64)
    row = tl.arange(0, BLOCK_ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    column = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (token < count)[:, None] & (column < HEAD_DIM)
    batch_token = (batch_row + token).to(tl.int64)
    at = batch_token * query_token_stride + head * query_head_stride
    q = tl.load(query_ptr + at[:, None] + column, mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    query_position = position + tl.minimum(token, count - 1)  # padding sees what the last sees
    acc, peak, total = _attend_tile(
        q, query_position, position, count, tl.load(tile + 4), tl.load(tile + 5),
        pool_ptr + kv_head * head_stride, part_stride, page_stride, token_stride,
        table_ptr + slot * table_stride, scale,
        HEAD_DIM, PAGE_SIZE, WINDOW, BLOCK_ROWS, BLOCK_KEYS, BLOCK_DIM, PRECISION, UPCAST,
    )  # fmt: skip
    out = out_ptr + (batch_token * out_token_stride + head * HEAD_DIM)[:, None] + column
    finish(
        acc, peak, total, place, out, averages_ptr, logarithms_ptr,
        (place + token) * NUM_HEADS + head, mask, token < count, column, HEAD_DIM,
    )  # fmt: skip


def prefill_attention(
    query: Tensor,
    pool: Tensor,
    page_table: Tensor,
    tiles: Tensor,
    merges: Tensor | None,
    *,
    out: Tensor,
    workspace: Workspace,
    window: int | None,
    config: PrefillConfig,
) -> None:
    """Write the attention of the tiles' tokens into their rows of `out`; other rows stay.

    `query` [tokens, num_heads, head_dim] is rotated, `out` [tokens, num_heads * head_dim]; `pool`
    is one layer's part of the cache, [pages, 2, num_kv_heads, page_size, head_dim], and holds keys
    and values of every position up to the tiles' last; `page_table` [slots, pages] integers. A row
    of `tiles` [tiles, TILE_FIELDS] int32 has at most `config.tokens(group)` tokens; its keys begin
    at a multiple of `config.block_keys` or with the first that any of its tokens sees. `merges`
    [rows, MERGE_FIELDS] int32 names the tokens whose keys are in several tiles, None that there are
    none. The token at position p sees keys [0, p], of which only the last `window` if there is one.
    """
    _, num_heads, head_dim = query.shape
    _, _, num_kv_heads, page_size, _ = pool.shape
    assert query.stride(2) == pool.stride(4) == out.stride(1) == 1, "head_dim must be dense"
    assert query.dtype == pool.dtype, f"{query.dtype} cannot attend to a pool of {pool.dtype}"
    grid = (num_kv_heads, tiles.shape[0])
    _prefill_kernel[grid](
        query, query.stride(0), query.stride(1), out, out.stride(0),
        workspace.averages, workspace.logarithms,
        pool, pool.stride(0), pool.stride(1), pool.stride(2), pool.stride(3),
        page_table, page_table.stride(0), tiles, head_dim**-0.5 * LOG2_E,
        NUM_HEADS=num_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        PAGE_SIZE=page_size, WINDOW=window or 0, TILE_FIELDS=TILE_FIELDS,
        BLOCK_ROWS=config.block_rows, BLOCK_KEYS=config.block_keys,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        PRECISION=dot_precision(query.dtype), UPCAST=INTERPRETED,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if merges is not None:
        merge(out, workspace, merges)
