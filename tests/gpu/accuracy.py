"""How far a kernel may be from its reference on real shapes: one table, and what compares.

A reference is computed in float64 from the very numbers that the kernel is given. What is compared
is vectors of at most `WIDTH` numbers (a head's output, a piece of a row), each by the length of its
error over its own length: a bound on absolute errors would let anything pass where long contexts
average values away, and one on all numbers together would hide a wrong head among thousands.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

WIDTH = 128

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16

BOUNDS: Mapping[tuple[str, torch.dtype], float] = {
    # One product and one sum in float32, one rounding. Rounding to bfloat16 alone is off by 1.7e-3
    # (root mean square, 2^-9 at most), to float16 by an eighth of that.
    ("rotate", FLOAT32): 3e-7,
    ("rotate", FLOAT16): 4e-4,
    ("rotate", BFLOAT16): 3e-3,
    # A sum of squares in float32, and roundings of each factor.
    ("norm", FLOAT32): 1e-6,
    ("norm", FLOAT16): 8e-4,
    ("norm", BFLOAT16): 6e-3,
    ("activation", FLOAT32): 1e-6,
    ("activation", FLOAT16): 4e-4,
    ("activation", BFLOAT16): 3e-3,
    # Probabilities are rounded before they weigh values, and so is the result. In float32 it is
    # the order of sums over as many as 32,768 keys.
    ("attention", FLOAT32): 2e-5,
    ("attention", FLOAT16): 8e-4,
    ("attention", BFLOAT16): 6e-3,
    # Two products one after the other, the first one's result rounded.
    ("lora", FLOAT32): 1e-5,
    ("lora", FLOAT16): 1e-3,
    ("lora", BFLOAT16): 8e-3,
}
"""Length of the error over length of the vector, by kernel and by the dtype of what it writes."""


def errors(got: Tensor, wanted: Tensor) -> Tensor:
    """Of each piece of at most `WIDTH` numbers of the last dimension, [pieces]; NaN where `got` has
    one. `wanted` is float64."""
    assert wanted.dtype == torch.float64, "a reference is float64"
    assert got.shape == wanted.shape, f"{tuple(got.shape)} is not {tuple(wanted.shape)}"
    lengths = []
    for mine, reference in zip(_pieces(got), _pieces(wanted), strict=True):
        error = torch.linalg.vector_norm(mine.double() - reference, dim=-1)
        length = torch.linalg.vector_norm(reference, dim=-1)
        # A vector of zeros must be met exactly.
        lengths.append(torch.where(error == 0, 0.0, error / length).flatten())
    return torch.cat(lengths)


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = torch.split(x, WIDTH, dim=-1)
    return pieces


def assert_close(kernel: str, got: Tensor, wanted: Tensor) -> None:
    """Every vector of `got` is within the bound of its kernel and dtype; a NaN never is."""
    off = errors(got, wanted)
    bound = BOUNDS[kernel, got.dtype]
    wrong = ~(off <= bound)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise AssertionError(
            f"{kernel} in {got.dtype}: {int(wrong.sum())} of {off.numel()} vectors are off by more"
            f" than {bound:g}, the first is number {first} by {float(off[first]):.3g}, the worst by"
            f" {float(off.nan_to_num(float('inf')).max()):.3g}"
        )
