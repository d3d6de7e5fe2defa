"""An adapter's weights in host memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from common.engine.parallel.shards import Cut, Shard


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


def part_of(adapter: LoraAdapter, shard: Shard, rest: Callable[[], None]) -> LoraAdapter:
    """What a rank needs of an adapter: of products that are cut by output the rows of `expand`, of
    those that are cut by input the columns of `shrink`, whose results the ranks' sum completes.

    `rest` is called between copies.
    """
    if shard.size == 1:
        return adapter
    layers = []
    for layer in adapter.layers:
        part = {}
        for module, factors in layer.items():
            part[module] = _part(factors, shard.cut(f"{module}.weight"))
            rest()
        layers.append(part)
    return replace(adapter, layers=tuple(layers))


def _part(factors: Factors, cut: Cut | None) -> Factors:
    if cut is None:
        return factors
    if cut.dim == 0:
        return replace(factors, expand=factors.expand[cut.index].clone())
    return replace(factors, shrink=factors.shrink[cut.index].clone())
