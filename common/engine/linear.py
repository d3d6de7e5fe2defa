"""Matrix multiplication with weights, as fast as plain torch gets for the number of rows.

On a CPU that has no bfloat16 arithmetic torch's bfloat16 product reads its weights once *per row*:
right for one row (it is bound by memory), 2 GB/s at eight, a fifth of the float32 rate at 256.
Converting the weights to float32 just in time beats it from three rows on, because a slab of
weights is still in cache when the product reads it, and it beats keeping float32 weights beside
(half the bytes come from memory). Microseconds, one thread, AVX2, 3072 x 576 weights out of
memory:

    rows                     1      2      4      8     16     64    256
    bfloat16               256    479    928   1963   4196  17212  60643
    float32 weights        664   1202    855   1043   1849   3582  12461
    float32, prepacked     569    532    620    823   1162   3021      -
    converted in time      418    589    739    876   1213   3908  12913   <- from 3 rows on

It costs one scratch slab of 8 MiB for the whole model. float16 without arithmetic of its own is
the same story: 242 us for one row, 45735 for 64, 14687 when converted in time.
"""

import torch
from torch import Tensor
from torch.nn import functional

from common.engine.cpu import is_native

SLAB_ELEMENTS = 2 << 20
"""Weights converted at a time: 8 MiB of float32, which a last-level cache share holds."""
MAX_DIRECT_ROWS = 2
"""Up to this many rows the 16-bit product itself is faster."""


class Linear:
    """`y = x W^T + b`; `weight` is [out_features, in_features], `x` [rows, in_features]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class UpcastLinear(Linear):
    """The same for 16-bit weights on a CPU without arithmetic of their dtype; see the module.

    `x` may be of that dtype or float32 and `y` is of it, or with `wide` what the product gives
    (float32 when converted in time): for a consumer that takes either, this saves two passes.
    `scratch` is a flat float32 tensor that all layers of a model may share: it holds nothing
    between two calls, so one thread at a time may call any of them.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, scratch: Tensor, *, wide: bool = False
    ) -> None:
        super().__init__(weight, bias)
        out_features, in_features = weight.shape
        assert scratch.numel() >= in_features, "the scratch must hold a row of weights"
        self._rows_a_slab = min(out_features, scratch.numel() // in_features)
        self._slab = scratch[: self._rows_a_slab * in_features].view(-1, in_features)
        self._bias32 = None if bias is None else bias.float()
        self._out_dtype = torch.float32 if wide else weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= MAX_DIRECT_ROWS:
            return functional.linear(x.to(self.weight.dtype), self.weight, self.bias)
        out_features = self.weight.shape[0]
        if self._rows_a_slab == out_features:
            self._slab.copy_(self.weight)
            return functional.linear(x.float(), self._slab, self._bias32).to(self._out_dtype)
        x32 = x.float()
        y = x.new_empty(x.shape[0], out_features, dtype=self._out_dtype)
        for first in range(0, out_features, self._rows_a_slab):
            last = min(first + self._rows_a_slab, out_features)
            slab = self._slab[: last - first].copy_(self.weight[first:last])
            bias = None if self._bias32 is None else self._bias32[first:last]
            y[:, first:last] = functional.linear(x32, slab, bias)
        return y


class LinearFactory:
    """Makes every `Linear` of one model, of the class that suits its weights and this machine."""

    def __init__(self, *, native: bool | None = None) -> None:
        """`native` says whether the machine computes with 16-bit numbers; None asks it."""
        self._native = native
        self._scratch: Tensor | None = None

    def make(self, weight: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Linear:
        """Both tensors must hold their final values already; for `wide` see `UpcastLinear`."""
        if weight.device.type != "cpu" or weight.dtype.itemsize != 2:
            return Linear(weight, bias)
        if is_native(weight.dtype) if self._native is None else self._native:
            return Linear(weight, bias)
        if self._scratch is None:
            self._scratch = torch.empty(SLAB_ELEMENTS)
        return UpcastLinear(weight, bias, self._scratch, wide=wide)
