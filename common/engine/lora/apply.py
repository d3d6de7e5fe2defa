"""Adds what each row's adapter changes to a product's output, for all adapters of a batch.

`plan_lora` decides once a step, `LoraBatch.add` is called after each product. Rows of the base
model are in no share and their outputs are never touched; a batch without adapters has no plan.

There are two ways, and a step may use both:

* `Share`: the rows of one adapter as two small products per target. What it costs is mostly calls.
* `Singles`: adapters with one row each (decode). Two products of one row each would be all calls,
  and one product over all their ranks computes every row with every adapter: at eight adapters
  seven eighths are thrown away, and a product of eight rows is not bound by memory any more. So
  each row meets its own ranks only, as `(shrink * x).sum()` and `(expand * low).sum()` over blocks
  of `GRANULE` ranks that know their row: it reads every weight once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.lora.pool import LoraPool, PlacedAdapter, TargetWeights
from common.engine.lora.ranges import GRANULE
from common.engine.lora.targets import Product

MAX_SINGLE_RANK = 32
"""From here on the calls of a `Share` cost less than the intermediate results of `Singles`."""
MAX_GAP = 2 * GRANULE
"""Rank rows of others that `Singles` may compute for nothing."""
LARGEST_LOW = 1e18
"""What a rank's value is bounded by in `Singles`: times the largest weight that is read this is
finite, so an adapter that overflows spoils its own rows only."""


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Rows [first, first + count) of a batch compute with what `slot` holds."""

    slot: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Share:
    """One adapter's rows."""

    rows: slice | Tensor
    first: int
    last: int
    """Its rank rows in the pool are [first, last)."""
    present: int

    def gain(self, weights: TargetWeights, x: Tensor, y: Tensor) -> None:
        """Add to `y` [rows, out_features] in place; `x` has the same rows, and the pool's dtype."""
        low = x @ weights.shrink[self.first : self.last].t()
        y.addmm_(low, weights.expand[self.first : self.last])


@dataclass(frozen=True, slots=True)
class Singles:
    """Adapters with one row each, whose blocks lie next to each other."""

    rows: slice | Tensor
    first: int
    last: int
    block_rows: Tensor
    """[blocks] which of `rows` a block of ranks belongs to."""
    spread: Tensor
    """[rows, blocks] 1 where it does, else 0."""
    present: int

    def gain(self, weights: TargetWeights, x: Tensor, y: Tensor) -> None:
        """As in `Share`, but `x` has a row per block."""
        blocks = x.shape[0]
        shrink = weights.shrink[self.first : self.last].view(blocks, GRANULE, -1)
        low = (shrink * x.unsqueeze(1)).sum(2)
        low = low.nan_to_num_(0.0).clamp_(-LARGEST_LOW, LARGEST_LOW)
        expand = weights.expand[self.first : self.last].view(blocks, GRANULE, -1)
        y.addmm_(self.spread, (expand * low.unsqueeze(2)).sum(1))


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """One step's plan."""

    layers: tuple[tuple[tuple[TargetWeights, ...], ...], ...]
    dtype: torch.dtype
    shares: tuple[Share | Singles, ...]

    def add(self, layer: int, product: Product, x: Tensor, y: Tensor) -> None:
        """Add to `y` [tokens, out], a product's output for `x` [tokens, in], in place.

        Both may be narrower than the pool's dtype: then the sum is rounded once.
        """
        targets = self.layers[layer][product]
        for share in self.shares:
            wanted = [weights for weights in targets if share.present & weights.bit]
            if wanted:
                self._add_share(share, wanted, x, y)

    def _add_share(
        self, share: Share | Singles, wanted: Sequence[TargetWeights], x: Tensor, y: Tensor
    ) -> None:
        mine = x[share.rows] if isinstance(share.rows, slice) else x.index_select(0, share.rows)
        if isinstance(share, Singles):
            mine = mine.index_select(0, share.block_rows)
        mine = mine.to(self.dtype)
        in_place = isinstance(share.rows, slice) and y.dtype is self.dtype
        out = y[share.rows] if isinstance(share.rows, slice) else y.index_select(0, share.rows)
        out = out.to(self.dtype)
        for weights in wanted:
            first = weights.target.first
            columns = slice(first, first + weights.target.out_features)
            share.gain(weights, mine, out[:, columns])
        if isinstance(share.rows, Tensor):
            y.index_copy_(0, share.rows, out.to(y.dtype))
        elif not in_place:
            y[share.rows] = out


def plan_lora(pool: LoraPool, rows: Sequence[LoraRows]) -> LoraBatch | None:
    """What a batch needs of the pool; None where no row has an adapter.

    `rows` are in the order of the batch and name slots that hold adapters.
    """
    if not rows:
        return None
    by_slot: dict[int, list[int]] = {}
    for part in rows:
        by_slot.setdefault(part.slot, []).extend(range(part.first, part.first + part.count))
    wide = pool.dtype is torch.float32  # the intermediate results would lose more than a product
    shares: list[Share | Singles] = []
    singles: list[tuple[PlacedAdapter, int]] = []
    for slot, numbers in by_slot.items():
        placed = pool.slot(slot)
        if len(numbers) == 1 and placed.range.rank <= MAX_SINGLE_RANK and wide:
            singles.append((placed, numbers[0]))
        else:
            shares.append(_share(pool, placed, numbers))
    for group in _neighbours(singles):
        if len(group) == 1:
            placed, number = group[0]
            shares.append(_share(pool, placed, [number]))
        else:
            shares.append(_singles(pool, group))
    return LoraBatch(pool.layers, pool.dtype, tuple(shares))


def _share(pool: LoraPool, placed: PlacedAdapter, numbers: Sequence[int]) -> Share:
    first = placed.range.first
    rows = _rows(pool, numbers)
    return Share(rows, first, first + placed.range.rank, placed.present)


def _singles(pool: LoraPool, group: Sequence[tuple[PlacedAdapter, int]]) -> Singles:
    """`group` is in the order of the pool; its rows are taken in the order of the batch."""
    numbers = sorted(number for _, number in group)
    first, last = group[0][0].range.first, group[-1][0].range.last
    block_rows = [0] * ((last - first) // GRANULE)
    spread = torch.zeros(len(numbers), len(block_rows), dtype=pool.dtype)
    present = 0
    for placed, number in group:
        row = numbers.index(number)
        begin = (placed.range.first - first) // GRANULE
        end = (placed.range.last - first) // GRANULE
        block_rows[begin:end] = [row] * (end - begin)
        spread[row, begin:end] = 1.0
        present |= placed.present
    blocks = torch.tensor(block_rows, device=pool.device)
    return Singles(_rows(pool, numbers), first, last, blocks, spread.to(pool.device), present)


def _neighbours(
    singles: Sequence[tuple[PlacedAdapter, int]],
) -> list[list[tuple[PlacedAdapter, int]]]:
    """Divide where the pool holds much of others in between."""
    groups: list[list[tuple[PlacedAdapter, int]]] = []
    for single in sorted(singles, key=lambda single: single[0].range.first):
        if groups and single[0].range.first - groups[-1][-1][0].range.last <= MAX_GAP:
            groups[-1].append(single)
        else:
            groups.append([single])
    return groups


def _rows(pool: LoraPool, numbers: Sequence[int]) -> slice | Tensor:
    """Ascending row numbers, as a slice where they follow each other."""
    first, last = numbers[0], numbers[-1] + 1
    if last - first == len(numbers):
        return slice(first, last)
    return torch.tensor(numbers, device=pool.device)
