"""An adapter's weights in host memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Factors:
    """What one linear layer's output gains: `scaling * expand @ shrink @ x`."""

    shrink: Tensor
    """PEFT's A: [rank, in_features], in the file's dtype."""
    expand: Tensor
    """PEFT's B: [out_features, rank]."""
    scaling: float

    @property
    def rank(self) -> int:
        return self.shrink.shape[0]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that fits the model it was read for."""

    layers: tuple[Mapping[str, Factors], ...]
    """Per decoder layer: by `Target.module`, what the adapter changes there."""
    rank: int
    """The largest of its modules'."""
    digest: str
    """Equal for adapters that compute the same with the same bits, wherever they lie."""
