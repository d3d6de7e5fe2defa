"""RMSNorm (Zhang and Sennrich, 2019): alone, behind a residual sum, and of each head's vector.

Everything is summed and scaled in float32 and rounded once at the end. A row is one program's: it
is read once, kept in registers, and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 1 << 16
"""Widest row; it has to fit into one program's registers."""
HEAD_ELEMENTS = 4096
"""What one program of `qk_norm_` takes, in whole heads."""


@triton.jit
def _rms_norm_kernel(
    x, delta, weight, out, x_stride, delta_stride, out_stride, width, eps,
    HAS_DELTA: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    place = x + row * x_stride + columns
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0)
        # Rounded before it is normed: what the next layers read is what was normed here.
        rounded = (value + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    if HAS_WEIGHT:
        normed *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _qk_norm_kernel(
    x, weight, token_stride, head_stride, num_heads, width, eps,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (heads < num_heads) & (columns < width)
    place = x + token * token_stride + heads * head_stride + columns
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)
    scaled = tl.load(weight + heads * width + columns, mask=inside, other=0.0).to(tl.float32)
    normed = value * scale[:, None] * scaled
    tl.store(place, normed.to(x.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`x` [rows, width] / rms(row) * `weight` [width], as `x`'s dtype; rows may be strided."""
    return _launch(x, None, weight, eps, out)


def add_rms_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """Add `delta` to `hidden` (both [rows, width]) in place, and give the norm of the sum."""
    assert delta.shape == hidden.shape
    return _launch(hidden, delta, weight, eps, out)


def qk_norm_(query_key: Tensor, weight: Tensor, eps: float) -> None:
    """Norm every head's vector in place: `query_key` [tokens, heads, head_dim], which may be a
    view of a fused projection, with `weight` [heads, head_dim]."""
    tokens, num_heads, width = query_key.shape
    assert query_key.stride(-1) == 1
    assert weight.shape == (num_heads, width)
    assert weight.is_contiguous()
    block = triton.next_power_of_2(width)
    heads = min(triton.next_power_of_2(num_heads), max(1, HEAD_ELEMENTS // block))
    _qk_norm_kernel[(tokens, triton.cdiv(num_heads, heads))](
        query_key, weight, query_key.stride(0), query_key.stride(1), num_heads, width, eps,
        HEADS=heads, BLOCK=block, num_warps=_warps(heads * block),
    )  # fmt: skip


def _launch(
    x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float, out: Tensor | None
) -> Tensor:
    rows, width = x.shape
    assert width <= MAX_WIDTH, f"rows of {width} are too wide"
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    # What is absent is never read; a pointer has to be given all the same.
    added, scales = x if delta is None else delta, x if weight is None else weight
    assert x.stride(1) == added.stride(1) == out.stride(1) == 1
    assert weight is None or weight.shape == (width,)
    assert weight is None or weight.is_contiguous()
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x, added, scales, out, x.stride(0), added.stride(0), out.stride(0), width, eps,
        HAS_DELTA=delta is not None, HAS_WEIGHT=weight is not None, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip
    return out


def _warps(elements: int) -> int:
    """Sixteen elements a thread, which keeps them in registers and still fills the memory bus."""
    return int(min(16, max(1, elements // 512)))
