"""Plans for `kernels.lora`: tensors at fixed addresses, so that a CUDA graph may hold the launches.

Everything that differs between two steps of as many rows is in these tensors. A step's values are
written on the current stream, behind the kernels that still read the last ones. Import this only
where kernels are used: it brings Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.engine.kernels.lora import FEW_ROWS, TargetTables, Tiles, add_lora, tile_size
from common.engine.lora.base import LoraRows
from common.engine.lora.pool import LoraPool, PlacedAdapter
from common.engine.lora.targets import Product


@dataclass(frozen=True, slots=True)
class ProductTargets:
    """The targets of one product, as the tables count them."""

    first: int
    count: int
    widest: int


@dataclass(frozen=True, slots=True)
class DeviceLoraBatch:
    """`LoraBatch`; where its tensors are fixed, the next plan for as many rows fills them anew."""

    tables: TargetTables
    products: tuple[ProductTargets, ...]
    tiles: Tiles

    def add(self, layer: int, product: Product, x: Tensor, y: Tensor) -> None:
        targets = self.products[product]
        add_lora(
            x, y, self.tables, self.tiles, layer=layer, first_target=targets.first,
            num_targets=targets.count, widest=targets.widest,
        )  # fmt: skip


class DeviceLora:
    """`LoraPlanner` for kernels. One thread's."""

    def __init__(self, pool: LoraPool, fixed_rows: int = 0) -> None:
        """Makes the pool, if it has not been. Plans of up to `fixed_rows` tokens share tensors.

        Raises AdapterError: there is no room for the pool.
        """
        pool.make()
        assert pool.memory is not None
        self._pool = pool
        self._fixed_rows = fixed_rows
        num_layers = len(pool.layers)
        self._num_targets = sum(map(len, pool.layers[0]))
        places = [
            [
                [
                    weights.shrink.storage_offset(), weights.expand.storage_offset(),
                    weights.target.first, weights.target.out_features,
                ]
                for product in layer
                for weights in product
            ]
            for layer in pool.layers
        ]  # fmt: skip
        self._tables = TargetTables(
            pool.memory,
            torch.tensor(places, dtype=torch.int64, device=pool.device),
            torch.zeros((pool.num_slots, 2 + num_layers), dtype=torch.int32, device=pool.device),
            pool.max_rank,
        )
        self._known: dict[int, PlacedAdapter] = {}
        self._products = tuple(_products(pool))
        most = max(rows + 3 * self._bound(rows) for rows in (fixed_rows, min(fixed_rows, FEW_ROWS)))
        self._fixed = torch.zeros(most, dtype=torch.int32, device=pool.device)

    def plan(self, rows: Sequence[LoraRows], num_rows: int) -> DeviceLoraBatch:
        """Never None: a graph that was captured with a plan of no rows serves any of as many.

        Raises KeyError for a slot that was never filled.
        """
        size, bound = tile_size(num_rows), self._bound(num_rows)
        values = np.zeros(num_rows + 3 * bound, dtype=np.int32)
        tiles = values[num_rows:].reshape(bound, 3)
        place = tile = 0
        for slot, parts in _by_slot(rows).items():
            self._refresh(slot)
            begin = place
            for part in parts:
                values[place : place + part.count] = np.arange(part.first, part.first + part.count)
                place += part.count
            for start in range(begin, place, size):
                tiles[tile] = slot, start, min(size, place - start)
                tile += 1
        held = self._fixed[: len(values)]
        if num_rows > self._fixed_rows:
            held = torch.empty(len(values), dtype=torch.int32, device=self._pool.device)
        self._write(held, values)
        cut = Tiles(held[:num_rows], held[num_rows:].view(bound, 3), size)
        return DeviceLoraBatch(self._tables, self._products, cut)

    def _bound(self, num_rows: int) -> int:
        """As many tiles as `num_rows` rows of any slots can need."""
        return min(num_rows, -(-num_rows // tile_size(num_rows)) + self._pool.num_slots)

    def _refresh(self, slot: int) -> None:
        """What the kernels know of a slot, if it has changed its adapter."""
        placed = self._pool.slot(slot)
        if self._known.get(slot) is placed:
            return
        ones = (1 << self._num_targets) - 1
        num_layers = len(self._pool.layers)
        width = self._num_targets
        masks = [(placed.present >> (layer * width)) & ones for layer in range(num_layers)]
        row = np.array([placed.range.first, placed.range.rank, *masks], dtype=np.int32)
        self._write(self._tables.slots[slot], row)
        self._known[slot] = placed

    def _write(self, target: Tensor, values: npt.NDArray[np.int32]) -> None:
        """In the order of the stream. The host's copy is pinned, and kept by torch until then."""
        host = torch.from_numpy(values)
        if target.device.type == "cuda":
            host = host.pin_memory()
        target.copy_(host, non_blocking=True)


def _by_slot(rows: Sequence[LoraRows]) -> dict[int, list[LoraRows]]:
    found: dict[int, list[LoraRows]] = {}
    for part in rows:
        found.setdefault(part.slot, []).append(part)
    return found


def _products(pool: LoraPool) -> list[ProductTargets]:
    found = []
    first = 0
    for product in pool.layers[0]:
        widest = max(weights.target.out_features for weights in product)
        found.append(ProductTargets(first, len(product), widest))
        first += len(product)
    return found
