"""What adapters add on real shapes equals float64, for every mixture of adapters in a batch."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from benchmarks.engine import smollm2_shape
from benchmarks.gpu_cells.scale import llama_8b_shape, tiny_shape, with_layers
from common.engine.lora.adapter import Factors, LoraAdapter
from common.engine.lora.base import LoraRows
from common.engine.lora.pool import LoraPool
from common.engine.lora.targets import Product, targets_of
from common.engine.spec import ModelSpec
from tests.gpu.accuracy import BFLOAT16, FLOAT16, FLOAT32, assert_close
from tests.gpu.cases import sized

RANKS = sized([8, 16, 64, 256], [2, 4])
SPECS = sized(
    [with_layers(llama_8b_shape(), 1), with_layers(smollm2_shape(), 1)],
    [with_layers(replace(tiny_shape(), hidden_size=32), 1)],
)
DTYPES = sized([BFLOAT16, FLOAT16, FLOAT32], [FLOAT32])


@dataclass(frozen=True)
class Mixture:
    """(slot or None, tokens) of each row of a batch."""

    name: str
    rows: tuple[tuple[int | None, int], ...]

    def __str__(self) -> str:
        return self.name


MIXTURES = sized(
    [
        Mixture("64 decoding, each another", tuple((n % 5 or None, 1) for n in range(64))),
        Mixture("256 decoding, one adapter", tuple((2, 1) for _ in range(256))),
        Mixture("chunks", ((1, 700), (None, 300), (3, 1000), (1, 48))),
        Mixture("one row", ((4, 1),)),
    ],
    [Mixture("mixed", ((1, 1), (None, 3), (2, 5), (1, 1)))],
)


def adapter(spec: ModelSpec, rank: int) -> LoraAdapter:
    layer = {
        target.module: Factors(
            torch.randn(rank, target.in_features) / target.in_features**0.5,
            torch.randn(target.out_features, rank) / rank**0.5,
            0.5,
        )
        for target in targets_of(spec)
    }
    return LoraAdapter((layer,), rank, "")


def expected(pool: LoraPool, mixture: Mixture, product: Product, x: Tensor, y: Tensor) -> Tensor:
    """Row by row in float64, from what the pool holds."""
    want = y.double()
    first = 0
    for slot, count in mixture.rows:
        rows = slice(first, first + count)
        first += count
        if slot is None:
            continue
        held = pool.slot(slot).range
        ranks = slice(held.first, held.first + held.rank)
        for weights in pool.layers[0][product]:
            low = x[rows].double() @ weights.shrink[ranks].double().t()
            columns = slice(
                weights.target.first, weights.target.first + weights.target.out_features
            )
            want[rows, columns] += low @ weights.expand[ranks].double()
    return want


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: str(spec.hidden_size))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_row_gains_what_its_adapter_says(
    spec: ModelSpec, mixture: Mixture, dtype: torch.dtype, device: torch.device
) -> None:
    from common.engine.ops import choose_ops

    torch.manual_seed(0)
    pool = LoraPool(spec, dtype, len(RANKS) + 1, max(RANKS), device)
    for slot, rank in enumerate(RANKS, start=1):
        pool.place(slot, adapter(spec, rank), lambda: None)
    num_rows = sum(count for _, count in mixture.rows)
    adapted, first = [], 0
    for row_slot, count in mixture.rows:
        if row_slot is not None:
            adapted.append(LoraRows(row_slot, first, count))
        first += count
    batch = choose_ops("triton").lora_planner(pool, num_rows).plan(adapted, num_rows)
    assert batch is not None
    base = [slot is None for slot, count in mixture.rows for _ in range(count)]
    for product in Product:
        targets = [weights.target for weights in pool.layers[0][product]]
        width = max(target.first + target.out_features for target in targets)
        x = torch.randn(num_rows, targets[0].in_features, device=device).to(dtype)
        y = torch.randn(num_rows, width, device=device).mul_(0.1).to(dtype)
        before = y.clone()
        batch.add(0, product, x, y)
        assert_close("lora", y, expected(pool, mixture, product, x, before))
        assert torch.equal(y[base], before[base]), "rows of the base model were touched"
