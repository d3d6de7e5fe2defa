"""Rotate query and key and store key and value in the paged pool, in one pass over the projection.

A program has one head of a few tokens. A query is rotated where it stands; a key is rotated on its
way into the pool, so that the projection's copy of it keeps its old value; a value is copied.
Half-split rotation as in `common.engine.rope`, computed in float32 and rounded once.

The pool of one layer is [pages, 2, num_kv_heads, page_size, head_dim]: any strides, but for the
last dimension, which is dense. Offsets are 64 bits wide: a pool is larger than 2^31 elements.
"""

import triton
import triton.language as tl
from torch import Tensor

from common.engine.kernels.tuning import StoreConfig


@triton.jit
def _rotated(x_ptr, cos_ptr, sin_ptr, offset, mask, HALF: tl.constexpr):
    """Both halves of rotated rows, float32: [BLOCK_TOKENS, BLOCK_HALF] each."""
    first = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    # Both halves of a row of cosines are equal, and those of sines but for the sign.
    cos = tl.load(cos_ptr + HALF + offset, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + HALF + offset, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(
    do_not_specialize=["table_stride", "num_tokens"],
    do_not_specialize_on_alignment=["table_ptr", "slots_ptr", "positions_ptr"],
)
def _rotate_and_store_kernel(
    qkv_ptr, qkv_token_stride, qkv_head_stride,
    cos_ptr, sin_ptr, rotation_stride,
    pool_ptr, page_stride, part_stride, head_stride, token_stride,
    table_ptr, table_stride, slots_ptr, positions_ptr, num_tokens,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    column = tl.arange(0, BLOCK_HALF)[None, :]
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    real = slot >= 0
    mask = real[:, None] & (column < HALF)
    row = token.to(tl.int64)[:, None]
    x = qkv_ptr + row * qkv_token_stride + head * qkv_head_stride + column
    offset = row * rotation_stride + column
    first, second = _rotated(x, cos_ptr, sin_ptr, offset, mask, HALF)
    if head < NUM_HEADS:
        tl.store(x, first.to(qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(x + HALF, second.to(qkv_ptr.dtype.element_ty), mask=mask)
    else:
        position = tl.load(positions_ptr + token, mask=real, other=0)
        entry = table_ptr + slot * table_stride + position // PAGE_SIZE
        page = tl.load(entry, mask=real, other=0).to(tl.int64)
        place = page * page_stride + (position % PAGE_SIZE) * token_stride
        key = pool_ptr + place[:, None] + (head - NUM_HEADS) * head_stride + column
        tl.store(key, first.to(pool_ptr.dtype.element_ty), mask=mask)
        tl.store(key + HALF, second.to(pool_ptr.dtype.element_ty), mask=mask)
        v = x + NUM_KV_HEADS * qkv_head_stride
        tl.store(key + part_stride, tl.load(v, mask=mask), mask=mask)
        tl.store(key + part_stride + HALF, tl.load(v + HALF, mask=mask), mask=mask)


def rotate_and_store(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    pool: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    config: StoreConfig | None = None,
) -> None:
    """Rotate the queries of `qkv` in place; put rotated keys and values where their tokens belong.

    `qkv` is [tokens, num_heads + 2 * num_kv_heads, head_dim], `rotation` (cos, sin) rows
    [tokens, 1, head_dim] in any float dtype, `pool` one layer's part of the cache in `qkv`'s dtype,
    [pages, 2, num_kv_heads, page_size, head_dim]. Token i goes to page
    `page_table[slots[i], positions[i] // page_size]` (all three integers); one whose slot is
    negative is padding, and neither read nor written.
    """
    num_tokens, total_heads, head_dim = qkv.shape
    _, _, num_kv_heads, page_size, _ = pool.shape
    cos, sin = rotation
    assert qkv.stride(2) == 1 and pool.stride(4) == 1, "head_dim must be dense"  # noqa: PT018
    assert qkv.dtype == pool.dtype, f"{qkv.dtype} does not go into a pool of {pool.dtype}"
    assert cos.stride() == sin.stride(), "cosines and sines lie alike"
    config = config or StoreConfig.default(num_tokens)
    num_heads = total_heads - 2 * num_kv_heads
    grid = (triton.cdiv(num_tokens, config.block_tokens), num_heads + num_kv_heads)
    _rotate_and_store_kernel[grid](
        qkv, qkv.stride(0), qkv.stride(1),
        cos, sin, cos.stride(0),
        pool, pool.stride(0), pool.stride(1), pool.stride(2), pool.stride(3),
        page_table, page_table.stride(0), slots, positions, num_tokens,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, PAGE_SIZE=page_size,
        BLOCK_TOKENS=config.block_tokens, BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
