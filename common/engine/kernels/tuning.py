"""Launch configurations."""

from dataclasses import dataclass

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels are interpreted in this process. `tl.dot` multiplies bfloat16 wrongly there, so
kernels cast its operands to float32 then."""


@dataclass(frozen=True)
class StoreConfig:
    block_tokens: int
    num_warps: int = 4

    @classmethod
    def default(cls, num_tokens: int) -> "StoreConfig":
        """Many programs where there are few tokens, wide ones where there are many."""
        return cls(2, 1) if num_tokens <= 256 else cls(16, 4)
