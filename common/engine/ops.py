"""The seam between the decoder and what computes it, beside attention and matrix products.

`TorchOps` runs wherever torch does and is the oracle; `common.engine.triton_ops.TritonOps` are the
same with kernels. One choice, made once, holds for a model, its adapters and its draws.
"""

from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from common.engine.lora.apply import TorchLora
from common.engine.lora.base import LoraPlanner
from common.engine.lora.pool import LoraPool

if TYPE_CHECKING:
    from common.engine.sampler import FusedDraws


class Ops(Protocol):
    """Rows are tokens. What ends in `_` works in place."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x` [rows, width] over its rows' root mean square, times `weight` [width]."""
        ...

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `hidden` in place, both [rows, width], and give the sum's `rms_norm`."""
        ...

    def qk_norm_(self, query_key: Tensor, weight: Tensor, eps: float) -> None:
        """Norm each head's vector of `query_key` [rows, heads, head_dim], which may be a strided
        view, and multiply it by its head's `weight` [heads, head_dim]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up` [rows, 2 * inner], as [rows, inner]. May use it up."""
        ...

    def lora_planner(self, pool: LoraPool, fixed_rows: int = 0) -> LoraPlanner:
        """Plans with the adapters in `pool`. Those of up to `fixed_rows` tokens keep their tensors
        at the same addresses, if they have any: a later plan for as many fills them anew.

        Raises AdapterError: the pool had to be made, and there is no room for it.
        """
        ...

    def fused_draws(self, vocab_size: int) -> "FusedDraws | None":
        """What draws a batch's tokens in one launch; None: nothing here does."""
        ...


class TorchOps:
    """`Ops` in plain torch."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        hidden += delta
        return functional.rms_norm(hidden, weight.shape, weight, eps)

    def qk_norm_(self, query_key: Tensor, weight: Tensor, eps: float) -> None:
        normed = functional.rms_norm(query_key, (query_key.shape[-1],), None, eps)
        torch.mul(normed, weight, out=query_key)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def lora_planner(self, pool: LoraPool, fixed_rows: int = 0) -> LoraPlanner:  # noqa: ARG002
        return TorchLora(pool)

    def fused_draws(self, vocab_size: int) -> "FusedDraws | None":  # noqa: ARG002
        return None


def choose_ops(kernels: Literal["torch", "triton"]) -> Ops:
    """What goes with the attention of this name (`device.choose_attention`)."""
    if kernels == "torch":
        return TorchOps()
    # Imported here: nothing of Triton is loaded where nothing of it is used.
    from common.engine.triton_ops import TritonOps

    return TritonOps()
