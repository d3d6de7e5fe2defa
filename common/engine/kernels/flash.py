"""Attention of a tile of queries to a range of paged keys: what prefill and decode share.

Online softmax (Milakov and Gimelshein; "FlashAttention", Dao et al.) in float32 and base 2: `peak`
is the highest score seen by each query, `total` the sum of 2^(score - peak), `acc` the values
weighted likewise. A score that is masked is -inf; `peak` begins at a finite number below all
scores, so that nothing ever computes inf - inf.

Keys and values are looked up by position: position p is at offset p % PAGE_SIZE of the page
`table[p // PAGE_SIZE]` (PagedAttention, Kwon et al.).
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
"""Where `peak` begins."""
UNMASKED: tl.constexpr = tl.constexpr(0)
"""Every query sees every key of these tiles."""
BOUNDED: tl.constexpr = tl.constexpr(1)
"""Keys outside [low, high) are neither read nor seen."""
CAUSAL: tl.constexpr = tl.constexpr(2)
"""Bounded, and a query sees no key behind it nor one that has left its window."""


@triton.jit
def _pages(table, start, low, high, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Page ids of positions [start, start + BLOCK_KEYS), as far as they are in [low, high)."""
    if PAGE_SIZE % BLOCK_KEYS == 0:  # tiles are aligned, so each lies in one page
        page = tl.load(table + start // PAGE_SIZE, mask=start < high, other=0)
    else:
        key = start + tl.arange(0, BLOCK_KEYS)
        page = tl.load(table + key // PAGE_SIZE, mask=(key >= low) & (key < high), other=0)
    return page.to(tl.int64)


@triton.jit
def _read(
    pointer, start, low, high, column,
    HEAD_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    MASK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Keys or values [BLOCK_KEYS, BLOCK_DIM]; zero where nothing is read."""
    key = start + tl.arange(0, BLOCK_KEYS)[:, None]
    if MASK == UNMASKED and BLOCK_DIM == HEAD_DIM:
        tile = tl.load(pointer)
    elif MASK == UNMASKED:
        tile = tl.load(pointer, mask=column < HEAD_DIM, other=0.0)
    elif BLOCK_DIM == HEAD_DIM:
        tile = tl.load(pointer, mask=(key >= low) & (key < high), other=0.0)
    else:
        inside = (key >= low) & (key < high) & (column < HEAD_DIM)
        tile = tl.load(pointer, mask=inside, other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _visible(
    query_position, start, low, high,
    BLOCK_KEYS: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """[queries, keys] or, where queries do not differ, [1, keys]."""
    key = (start + tl.arange(0, BLOCK_KEYS))[None, :]
    visible = (key >= low) & (key < high)
    if MASK == CAUSAL:
        visible = visible & (key <= query_position[:, None])
        if WINDOW > 0:
            visible = visible & (key > query_position[:, None] - WINDOW)
    return visible


@triton.jit
def attend(
    acc, peak, total, q, query_position, first, last, low, high,
    pool, part_stride, page_stride, token_stride, table, scale,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Take keys [first, last) into (acc, peak, total), in tiles of BLOCK_KEYS from `first` on.

    `first` is a multiple of BLOCK_KEYS. `pool` points at one KV head of one layer, `table` at one
    sequence's row of the page table. `scale` includes log2(e).

    The page ids of a tile are loaded while the tile before it is computed. Loaded in their own turn
    they would be a stage of Triton's pipeline, and leave keys and values half of its depth.
    """
    column = tl.arange(0, BLOCK_DIM)[None, :]
    next_page = _pages(table, first, low, high, PAGE_SIZE, BLOCK_KEYS)
    for start in range(first, last, BLOCK_KEYS):
        page = next_page
        next_page = _pages(table, start + BLOCK_KEYS, low, high, PAGE_SIZE, BLOCK_KEYS)
        offset = (start + tl.arange(0, BLOCK_KEYS)) % PAGE_SIZE
        pointer = pool + (page * page_stride + offset * token_stride)[:, None] + column
        k = _read(pointer, start, low, high, column, HEAD_DIM, BLOCK_KEYS, BLOCK_DIM, MASK, UPCAST)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASK != UNMASKED:
            seen = _visible(query_position, start, low, high, BLOCK_KEYS, WINDOW, MASK)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weights, 1)
        v = _read(
            pointer + part_stride, start, low, high, column,
            HEAD_DIM, BLOCK_KEYS, BLOCK_DIM, MASK, UPCAST,
        )  # fmt: skip
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        peak = higher
    return acc, peak, total
