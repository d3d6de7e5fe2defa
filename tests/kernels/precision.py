"""How far a kernel may be from its reference: one table, and the comparison that uses it.

A reference is computed in float64 from the very numbers the kernel is given, so what is left is the
kernel's own: float32 accumulation in another order, and the rounding of what it stores. Each value
may be off by `absolute + relative * |wanted|`. The bounds hold on hardware and under the
interpreter, which multiplies as float32 what hardware multiplies as bfloat16, and cuts a bfloat16
off where hardware rounds it.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
"""Where the tests' tensors are."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Bound:
    relative: float
    absolute: float


BOUNDS: dict[tuple[str, torch.dtype], Bound] = {
    # One product and one sum, then one rounding (2^-8 of bfloat16 where it is cut off).
    ("rope", torch.float32): Bound(2**-22, 2**-22),
    ("rope", torch.float16): Bound(2**-10, 2**-20),
    ("rope", torch.bfloat16): Bound(2**-7, 2**-20),
    # A sum of squares and its root in float32, then one rounding.
    ("rms_norm", torch.float32): Bound(2**-20, 2**-30),
    ("rms_norm", torch.float16): Bound(2**-10, 2**-20),
    ("rms_norm", torch.bfloat16): Bound(2**-7, 2**-20),
    # One sum, one rounding.
    ("sum", torch.float32): Bound(2**-23, 0.0),
    ("sum", torch.float16): Bound(2**-10, 2**-24),
    ("sum", torch.bfloat16): Bound(2**-7, 0.0),
    # An exponential and two products in float32, then one rounding.
    ("silu_mul", torch.float32): Bound(2**-20, 2**-30),
    ("silu_mul", torch.float16): Bound(2**-10, 2**-20),
    ("silu_mul", torch.bfloat16): Bound(2**-7, 2**-20),
    # Two sums of products behind each other, added to y and rounded once. On hardware what is
    # between them has TF32's 11 bits where weights have 16; the adapters' terms are of magnitude
    # `x shrink expand`, and cancel: the absolute part is for the largest of them being 1.
    ("lora", torch.float32): Bound(2**-18, 2**-18),
    ("lora", torch.float16): Bound(2**-9, 2**-9),
    ("lora", torch.bfloat16): Bound(2**-6, 2**-7),
    # Values are averaged, of magnitude about 1: probabilities are rounded to the values' dtype
    # before the second product, the average once more when it is stored.
    ("attention", torch.float32): Bound(2**-18, 2**-18),
    ("attention", torch.float16): Bound(2**-9, 2**-9),
    ("attention", torch.bfloat16): Bound(2**-6, 2**-6),
}
"""By kernel and by the dtype of what it reads and writes."""


def assert_close(kernel: str, got: Tensor, wanted: Tensor) -> None:
    """`wanted` is float64; a NaN in `got` (a poisoned output that nobody wrote) is far from all."""
    bound = BOUNDS[kernel, got.dtype]
    wanted = wanted.to(got.device)
    assert wanted.dtype == torch.float64, "a reference is float64"
    assert got.shape == wanted.shape, f"{got.shape} is not {wanted.shape}"
    error = (got.double() - wanted).abs()
    allowed = bound.absolute + bound.relative * wanted.abs()
    wrong = ~(error <= allowed)
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{kernel} in {got.dtype}: {int(wrong.sum())} of {got.numel()} values are off, the"
            f" first at {first}: {got[first].item()!r} instead of {wanted[first].item()!r}"
            f" (allowed {allowed[first].item():.3g})"
        )


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """All NaN: an output that a kernel must write everywhere, or memory that it must not read."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normally distributed numbers, the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)
