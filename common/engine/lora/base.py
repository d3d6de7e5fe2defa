"""What the decoder and a runner see of adapters, whatever computes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.engine.lora.targets import Product


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Rows [first, first + count) of a batch compute with what `slot` holds."""

    slot: int
    first: int
    count: int


class LoraBatch(Protocol):
    """One step's plan."""

    def add(self, layer: int, product: Product, x: Tensor, y: Tensor) -> None:
        """Add to `y` [tokens, out], a product's output for `x` [tokens, in], in place.

        Rows of the base model are not touched.
        """
        ...


class LoraPlanner(Protocol):
    """Makes plans over one pool."""

    def plan(self, rows: Sequence[LoraRows], num_rows: int) -> LoraBatch | None:
        """What a batch of `num_rows` tokens needs; None only where no row has an adapter.

        `rows` are in the order of the batch and name slots that hold adapters.
        """
        ...
