"""Rotary position embedding: tables of cosines and sines, and their application.

Frequencies come from transformers (`ROPE_INIT_FUNCTIONS`), which knows every scaling that the
served families ship. Su et al., "RoFormer"; half-split form as in GPT-NeoX and Llama.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.engine.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class RopeFrequencies:
    """`inverse` [head_dim / 2], float32; `scale` multiplies cosine and sine (yarn's attention)."""

    inverse: Tensor
    scale: float


def frequencies(config: "PretrainedConfig", spec: ModelSpec) -> RopeFrequencies:
    """Inverse frequencies of a checked config (`spec` was made from it)."""
    if spec.rope_type != "default":
        inverse, scale = ROPE_INIT_FUNCTIONS[spec.rope_type](config, device=torch.device("cpu"))
        return RopeFrequencies(inverse.float(), float(scale))
    theta = config.rope_parameters["rope_theta"]
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    return RopeFrequencies(1.0 / theta**exponents, 1.0)


class RopeTable:
    """cos and sin of every position below `length`, [length, 1, head_dim] each.

    The sine's first half is negated, so that rotating is `x * cos + roll(x) * sin`: one pass less
    than building (-x2, x1). They are worked out on the CPU, so that all devices rotate alike.
    """

    def __init__(
        self,
        rope: RopeFrequencies,
        length: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * rope.inverse
        cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
        self._cos = torch.cat((cos, cos), dim=-1).unsqueeze(1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) rows of `positions` [tokens], each [tokens, 1, head_dim]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate `x` [tokens, heads, head_dim] in place; it may be a strided view."""
    rolled = x.roll(x.shape[-1] // 2, dims=-1)
    torch.addcmul(x * cos, rolled, sin, out=x)
