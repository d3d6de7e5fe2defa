"""Adds in torch what each row's adapter changes to a product's output, for all of a batch.

`plan_lora` decides once a step, `TorchLoraBatch.add` is called after each product. Rows of the base
model are in no share and their outputs are never touched; a batch without adapters has no plan.
What one adapter computes, overflows included, never enters another's rows.

There are two ways, and a step may use both:

* `Share`: the rows of one adapter as two small products per target. What it costs is mostly calls.
* `Singles`: adapters with one row each (decode). Two products of one row each would be all calls,
  and one product over all their ranks computes every row with every adapter: at eight adapters
  seven eighths are thrown away, and a product of eight rows is not bound by memory any more. So
  each row meets its own ranks only: blocks of `GRANULE` ranks, each times its row's x, in one
  batched product, and then a weighted sum of rows of `expand`, which is what torch calls an
  embedding bag. Together they read every weight once.

Decode steps of SmolLM2-135M in bfloat16, one thread, AVX2, every row with an adapter of its own, as
ratios to the same step of the base model (`python -m benchmarks.lora_engine --paths`; fastest of
nine in turn, on a busy machine):

    rank                           8     16     32     64
    2 adapters, singles         1.22   1.27   1.36   1.46
    2 adapters, a share each    1.69   1.31   1.33   1.60
    8 adapters, singles         1.19   1.31   1.35   1.69
    8 adapters, a share each    1.38   1.44   1.39   1.82

One product over the ranks of all eight, masked, took 28 ms where singles take 19 (8 rows, rank 16).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.lora.base import LoraRows
from common.engine.lora.pool import LoraPool, PlacedAdapter, TargetWeights
from common.engine.lora.ranges import GRANULE
from common.engine.lora.targets import Product

MAX_SINGLE_RANK = 64
"""Beyond, the calls of a `Share` cost less than the intermediate results of `Singles`."""
MAX_GAP = 2 * GRANULE
"""Rank rows of others that `Singles` may compute for nothing."""


@dataclass(frozen=True, slots=True)
class Share:
    """One adapter's rows."""

    rows: slice | Tensor
    first: int
    last: int
    """Its rank rows in the pool are [first, last)."""
    present: int

    def prepare(self, x: Tensor) -> Tensor:
        """What `gain` takes, from the batch's x."""
        return _take(x, self.rows)

    def gain(self, weights: TargetWeights, x: Tensor) -> Tensor:
        """[rows, out_features] in the pool's dtype, which `x` has."""
        low = x @ weights.shrink[self.first : self.last].t()
        return low @ weights.expand[self.first : self.last]


@dataclass(frozen=True, slots=True)
class Singles:
    """Adapters with one row each, whose ranges are neighbours in the pool."""

    rows: slice | Tensor
    first: int
    last: int
    """Rank rows [first, last) hold them all, and maybe a few of others, or of nobody."""
    block_rows: Tensor
    """[blocks of `GRANULE`] which row of the batch each belongs to; any row, if it is another's."""
    low_ranks: Tensor
    """Counted from `first`: the ranks of the first row's adapter, then of the second's, ..."""
    ranks: Tensor
    """The same in the pool's count."""
    offsets: Tensor
    """[rows] where in `ranks` each row's begin."""
    present: int

    def prepare(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.block_rows)

    def gain(self, weights: TargetWeights, x: Tensor) -> Tensor:
        shrink = weights.shrink[self.first : self.last].view(x.shape[0], GRANULE, -1)
        low = torch.bmm(x.unsqueeze(1), shrink.transpose(1, 2)).view(-1)
        low = low.index_select(0, self.low_ranks)
        summed: Tensor = torch.embedding_bag(
            weights.expand, self.ranks, self.offsets, mode=0, per_sample_weights=low
        )[0]
        return summed


@dataclass(frozen=True, slots=True)
class TorchLoraBatch:
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
            if not wanted:
                continue
            mine = share.prepare(x).to(self.dtype)
            out = _take(y, share.rows)
            for weights in wanted:
                first = weights.target.first
                columns = out[:, first : first + weights.target.out_features]
                columns += share.gain(weights, mine)
            if isinstance(share.rows, Tensor):
                y.index_copy_(0, share.rows, out)


class TorchLora:
    """`LoraPlanner` for any device that torch computes on."""

    def __init__(self, pool: LoraPool) -> None:
        self._pool = pool

    def plan(self, rows: Sequence[LoraRows], num_rows: int) -> TorchLoraBatch | None:  # noqa: ARG002
        return plan_lora(self._pool, rows)


def _take(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    """A view where `rows` allow it, else a copy."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def plan_lora(pool: LoraPool, rows: Sequence[LoraRows]) -> TorchLoraBatch | None:
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
    return TorchLoraBatch(pool.layers, pool.dtype, tuple(shares))


def _share(pool: LoraPool, placed: PlacedAdapter, numbers: Sequence[int]) -> Share:
    first = placed.range.first
    rows = _rows(pool, numbers)
    return Share(rows, first, first + placed.range.rank, placed.present)


def _singles(pool: LoraPool, group: Sequence[tuple[PlacedAdapter, int]]) -> Singles:
    """`group` is in the order of the pool."""
    first, last = group[0][0].range.first, group[-1][0].range.last
    block_rows = [group[0][1]] * ((last - first) // GRANULE)
    present = 0
    for placed, number in group:
        begin = (placed.range.first - first) // GRANULE
        end = (placed.range.last - first) // GRANULE
        block_rows[begin:end] = [number] * (end - begin)
        present |= placed.present
    ranks: list[int] = []
    offsets: list[int] = []
    numbers: list[int] = []
    for placed, number in sorted(group, key=lambda single: single[1]):
        numbers.append(number)
        offsets.append(len(ranks))
        ranks += range(placed.range.first, placed.range.first + placed.range.rank)
    pool_ranks = torch.tensor(ranks, device=pool.device)
    return Singles(
        rows=_rows(pool, numbers),
        first=first,
        last=last,
        block_rows=torch.tensor(block_rows, device=pool.device),
        low_ranks=pool_ranks - first,
        ranks=pool_ranks,
        offsets=torch.tensor(offsets, device=pool.device),
        present=present,
    )


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
