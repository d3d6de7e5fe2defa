"""Norms and activation equal float64 on real widths and numbers of rows."""

import pytest
import torch
from torch import Tensor

from tests.gpu.accuracy import assert_close
from tests.gpu.cases import DTYPES, LLAMA_8B, SMOLLM2, TINY, sized
from tests.gpu.paged import Shape

EPS = 1e-5
ROWS = sized([1, 7, 256, 8192], [3])
WIDTHS = sized([576, 4096, 8192], [24])
INNERS = sized([1536, 14_336], [40])
HEADS = sized([SMOLLM2, LLAMA_8B], [TINY])


def random(*size: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Rows of very different magnitude, dense."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(size, generator=generator, device=device)
    scale = torch.logspace(-2, 2, size[0], device=device).view(-1, *[1] * (len(size) - 1))
    return (values * scale).to(dtype)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm over the last dimension in float64."""
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def weights(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, device=device).uniform_(0.5, 1.5).to(dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_alone_and_behind_a_residual(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    from common.engine.kernels.norm import add_rms_norm, rms_norm

    x = random(rows, width, dtype=dtype, device=device)
    delta = random(rows, width, dtype=dtype, device=device, seed=1)
    weight = weights(width, dtype=dtype, device=device)
    out = torch.full_like(x, float("nan"))

    rms_norm(x, weight, EPS, out=out)
    assert_close("norm", out, normed(x, weight))

    total = x.double() + delta.double()
    out.fill_(float("nan"))
    add_rms_norm(x, delta, weight, EPS, out=out)
    assert_close("norm", x, total)
    assert_close("norm", out, normed(x, weight))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_head_is_normed_in_a_fused_projection(
    rows: int, shape: Shape, dtype: torch.dtype, device: torch.device
) -> None:
    from common.engine.kernels.norm import qk_norm_

    heads = shape.num_heads + shape.num_kv_heads
    size = (rows, heads + shape.num_kv_heads, shape.head_dim)
    fused = random(*size, dtype=dtype, device=device)
    before = fused.clone()
    weight = weights(heads, shape.head_dim, dtype=dtype, device=device)

    qk_norm_(fused[:, :heads], weight, EPS)

    assert_close("norm", fused[:, :heads], normed(before[:, :heads], weight))
    assert torch.equal(fused[:, heads:], before[:, heads:])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(rows: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
    from common.engine.kernels.activation import silu_mul

    fused = torch.randn(rows, 2 * inner, device=device).mul_(4).to(dtype)
    out = torch.full((rows, inner), float("nan"), dtype=dtype, device=device)

    silu_mul(fused, out=out)

    gate, up = fused.double().chunk(2, -1)
    assert_close("activation", out, gate * torch.sigmoid(gate) * up)
