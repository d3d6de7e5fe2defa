"""`Ops` with kernels. Import this only where they are used: it brings Triton."""

from torch import Tensor

from common.engine.kernel_draws import KernelDraws
from common.engine.kernels.activation import silu_mul
from common.engine.kernels.norm import add_rms_norm, qk_norm_, rms_norm
from common.engine.kernels.sampling import MAX_VOCAB
from common.engine.lora.base import LoraPlanner
from common.engine.lora.device import DeviceLora
from common.engine.lora.pool import LoraPool
from common.engine.sampler import FusedDraws


class TritonOps:
    """Each in one launch, summed in float32 and rounded once."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(hidden, delta, weight, eps)

    def qk_norm_(self, query_key: Tensor, weight: Tensor, eps: float) -> None:
        qk_norm_(query_key, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def lora_planner(self, pool: LoraPool, fixed_rows: int = 0) -> LoraPlanner:
        return DeviceLora(pool, fixed_rows)

    def fused_draws(self, vocab_size: int) -> FusedDraws | None:
        return KernelDraws() if vocab_size <= MAX_VOCAB else None
