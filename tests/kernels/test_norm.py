"""Norms and activations: every value is written, equals float64's, and neighbours keep theirs."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.kernels.activation import silu_mul
from common.engine.kernels.norm import add_rms_norm, qk_norm_, rms_norm
from tests.kernels.precision import DEVICE, DTYPES, assert_close, normal, poisoned

EPS = 1e-5


def reference(x: Tensor, weight: Tensor | None) -> Tensor:
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    return normed if weight is None else normed * weight.double()


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(DTYPES), st.integers(1, 5), st.sampled_from([1, 16, 48, 100]),
    st.booleans(), st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
)  # fmt: skip
def test_rms_norm(dtype: torch.dtype, rows: int, width: int, weighted: bool, scale: float) -> None:
    x = normal(rows, width + 8, dtype=dtype, seed=rows)[:, 8:].mul_(scale)
    weight = normal(width, dtype=dtype, seed=2) if weighted else None
    before, out = x.clone(), poisoned(rows, width + 1, dtype=dtype)
    assert_close("rms_norm", rms_norm(x, weight, EPS, out=out[:, :width]), reference(x, weight))
    assert torch.equal(x, before)
    assert bool(out[:, width].isnan().all()), "written beyond the row"


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 5), st.sampled_from([1, 16, 48, 100]))
def test_the_sum_is_stored_and_what_is_stored_is_normed(
    dtype: torch.dtype, rows: int, width: int
) -> None:
    hidden = normal(rows, width, dtype=dtype, seed=3)
    delta = normal(rows, width + 3, dtype=dtype, seed=4)[:, 3:]
    weight = normal(width, dtype=dtype, seed=5)
    total = hidden.double() + delta.double()
    normed = add_rms_norm(hidden, delta, weight, EPS, out=poisoned(rows, width, dtype=dtype))
    assert_close("sum", hidden, total)
    assert_close("rms_norm", normed, reference(hidden, weight))


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(DTYPES), st.integers(1, 4), st.sampled_from([1, 3, 5, 12]),
    st.sampled_from([16, 24, 32]),
)  # fmt: skip
def test_heads_are_normed_in_place_and_values_are_left(
    dtype: torch.dtype, tokens: int, heads: int, head_dim: int
) -> None:
    qkv = normal(tokens, (heads + 2) * head_dim, dtype=dtype, seed=6).view(tokens, -1, head_dim)
    weight = normal(heads, head_dim, dtype=dtype, seed=7)
    before = qkv.clone()
    qk_norm_(qkv[:, :heads], weight, EPS)
    assert_close("rms_norm", qkv[:, :heads], reference(before[:, :heads], weight))
    assert torch.equal(qkv[:, heads:], before[:, heads:])


def test_more_heads_than_one_program_takes() -> None:
    qkv = normal(2, 40 * 128, dtype=torch.float32, seed=8).view(2, 40, 128)
    weight = normal(40, 128, dtype=torch.float32, seed=9)
    want = reference(qkv, weight)
    qk_norm_(qkv, weight, EPS)
    assert_close("rms_norm", qkv, want)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(DTYPES), st.integers(1, 4), st.sampled_from([1, 16, 40, 1030]),
    st.sampled_from([1.0, 30.0]),
)  # fmt: skip
def test_silu_mul(dtype: torch.dtype, rows: int, inner: int, scale: float) -> None:
    fused = normal(rows, 2 * inner + 5, dtype=dtype, seed=inner)[:, : 2 * inner]
    fused[:, :inner] *= scale
    gate, up = fused.double().chunk(2, dim=-1)
    out = poisoned(rows, inner + 1, dtype=dtype)
    want = gate / (1 + (-gate).exp()) * up
    assert_close("silu_mul", silu_mul(fused, out=out[:, :inner]), want)
    assert bool(out[:, inner].isnan().all()), "written beyond the row"


def test_a_gate_far_below_zero_closes() -> None:
    fused = torch.tensor([[-1e4, -200.0, 200.0, 3.0, 3.0, 3.0]], device=DEVICE)
    assert silu_mul(fused).tolist() == [[0.0, 0.0, 600.0]]
