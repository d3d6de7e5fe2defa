"""Launch configurations."""

from dataclasses import dataclass

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels are interpreted in this process. `tl.dot` multiplies bfloat16 wrongly there, so
kernels cast its operands to float32 then."""


def dot_precision(dtype: torch.dtype) -> str:
    """Of `tl.dot`: float32 is multiplied as float32, which other dtypes do not ask for."""
    return "ieee" if dtype is torch.float32 else "tf32"


@dataclass(frozen=True)
class StoreConfig:
    block_tokens: int
    num_warps: int = 4

    @classmethod
    def default(cls, num_tokens: int) -> "StoreConfig":
        """Many programs where there are few tokens, wide ones where there are many."""
        return cls(2, 1) if num_tokens <= 256 else cls(16, 4)


@dataclass(frozen=True)
class PrefillConfig:
    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int

    def tokens(self, group: int) -> int:
        """Tokens of a tile, where `group` query heads share a KV head."""
        return max(1, self.block_rows // group)


@dataclass(frozen=True)
class DecodeConfig:
    block_keys: int
    num_warps: int
    num_stages: int
    min_keys: int


@dataclass(frozen=True)
class AttentionTuning:
    prefill: PrefillConfig
    decode: DecodeConfig
    decode_programs: int
    store: StoreConfig | None = None

    @classmethod
    def default(
        cls, device: torch.device, head_dim: int, dtype: torch.dtype
    ) -> "AttentionTuning":
        return cls(PrefillConfig(16, 16, 4, 2), DecodeConfig(16, 4, 2, 32), 8)
