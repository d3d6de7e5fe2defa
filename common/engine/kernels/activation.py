"""SiLU of the gate half of the fused product, times the up half (SwiGLU; Shazeer, 2020)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(fused, out, fused_stride, out_stride, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    place = fused + row * fused_stride + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + inner, mask=inside, other=0.0).to(tl.float32)
    # exp of a large number would overflow: |gate| keeps it in (0, 1].
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    value = gate * sigmoid * up
    tl.store(out + row * out_stride + columns, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` of `gate_up` [rows, 2 * inner], as [rows, inner] of the same dtype."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    assert gate_up.stride(1) == out.stride(1) == 1
    block = min(BLOCK, triton.next_power_of_2(inner))
    _silu_mul_kernel[(rows, triton.cdiv(inner, block))](
        gate_up, out, gate_up.stride(0), out.stride(0), inner, BLOCK=block, num_warps=4
    )
    return out
