"""All adapters of a batch in two launches equal the formula, whatever rows, slots and ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.kernels import lora as kernels
from common.engine.lora import pool as pools
from common.engine.lora.adapter import Factors, LoraAdapter
from common.engine.lora.base import LoraRows
from common.engine.lora.device import DeviceLora
from common.engine.lora.pool import LoraPool
from common.engine.lora.targets import Product
from tests.kernels.precision import DEVICE, DTYPES, assert_close, normal
from tests.lora_cases import SLOTS, WIDTHS, Case, adapter, cases

ALL = [True] * 7


@contextmanager
def weights_as_the_model(small_tiles: int = 0) -> Iterator[None]:
    """A pool on a CPU would hold bfloat16 adapters in float32. `small_tiles` are few rows."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pools, "pool_dtype", lambda dtype, device: dtype)
        if small_tiles:
            patched.setattr(kernels, "FEW_ROWS", small_tiles)
            patched.setattr(kernels, "SPLIT", 8)
            patched.setattr(kernels, "BLOCK_INNER", 16)
        yield


def rounded(each: LoraAdapter, dtype: torch.dtype) -> LoraAdapter:
    """As the pool will hold it, so that the reference computes with the same numbers."""
    layers = []
    for layer in each.layers:
        held = {}
        for module, factors in layer.items():
            expand = (factors.expand * factors.scaling).to(dtype).float() / factors.scaling
            held[module] = Factors(factors.shrink.to(dtype).float(), expand, factors.scaling)
        layers.append(held)
    return LoraAdapter(tuple(layers), each.rank, each.digest)


def check(case: Case, pool: LoraPool, planner: DeviceLora, num_rows: int) -> None:
    """Every product over `num_rows` rows, the last of which may be padding."""
    plan = planner.plan(case.lora_rows(), num_rows)
    tokens = sum(count for _, count in case.rows)
    base = [slot is None for slot, count in case.rows for _ in range(count)]
    base += [True] * (num_rows - tokens)
    for product, (width, out) in WIDTHS.items():
        x = normal(num_rows, width + 4, dtype=pool.dtype, seed=1)[:, :width]
        y = normal(num_rows, out + 4, dtype=pool.dtype, seed=2)[:, :out]
        x[tokens:] = float("nan")
        want = case.expected(product, x[:tokens].cpu(), y[:tokens].cpu())
        before = y.clone()
        plan.add(0, product, x, y)
        assert torch.equal(y[base], before[base]), "rows of the base model are not touched"
        scale = max(1.0, float(want.abs().max()))
        assert_close("lora", y[:tokens] / scale, want / scale)


@settings(max_examples=20, deadline=None)
@given(
    cases([1, 7, 9, 32, 33, 70], 6),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
    st.sampled_from([0, 3]),
)
def test_any_mix_equals_the_formula(
    case: Case, dtype: torch.dtype, padding: int, small_tiles: int
) -> None:
    case.adapters = {slot: rounded(each, dtype) for slot, each in case.adapters.items()}
    tokens = sum(count for _, count in case.rows)
    with weights_as_the_model(small_tiles):
        pool = case.pool(dtype, DEVICE)
        check(case, pool, DeviceLora(pool, 2), tokens + padding)


def test_a_plan_sees_what_slots_hold_now() -> None:
    """One planner over steps of different sizes, while slots change their adapters."""
    with weights_as_the_model():
        case = Case({0: adapter(8, ALL), 3: adapter(33, ALL)}, [(0, 1), (3, 2), (None, 1)])
        pool = case.pool(torch.float32, DEVICE)
        planner = DeviceLora(pool, 9)
        check(case, pool, planner, 4)
        other = adapter(5, [True, False, True, False, False, True, False])
        pool.place(3, other, lambda: None)
        now = {0: case.adapters[0], 3: other, 5: adapter(1, ALL)}
        changed = Case(now, [(3, 4), (0, 2), (5, 3)])
        pool.place(5, changed.adapters[5], lambda: None)
        check(changed, pool, planner, 9)
        with pytest.raises(KeyError):
            planner.plan([LoraRows(4, 0, 1)], 1)


def test_a_plan_of_no_rows_is_refilled_where_it_stands() -> None:
    """What a CUDA graph needs: the same launches, whose tensors change behind them."""
    with weights_as_the_model():
        case = Case({0: adapter(8, ALL), 2: adapter(16, ALL)}, [(2, 1), (None, 1), (0, 1), (2, 1)])
        planner = DeviceLora(case.pool(torch.float32, DEVICE), 64)
        captured = planner.plan([], 4)
        x, y = normal(4, 12, dtype=torch.float32, seed=1), torch.zeros(4, 32, device=DEVICE)
        captured.add(0, Product.QKV, x, y)
        assert bool((y == 0).all())
        planner.plan(case.lora_rows(), 4)
        captured.add(0, Product.QKV, x, y)
        assert_close("lora", y / 8, case.expected(Product.QKV, x.cpu(), torch.zeros(4, 32)) / 8)


def test_tiles_never_outnumber_their_bound() -> None:
    """One row too many in each slot, in large tiles and small ones."""
    for size, few in ((kernels.SMALL_TILE, 0), (kernels.LARGE_TILE, 3)):
        with weights_as_the_model(few):
            used = {slot: adapter(2, [True] + [False] * 6) for slot in range(SLOTS)}
            rows: list[tuple[int | None, int]] = [(slot, 1) for slot in range(SLOTS)]
            case = Case(used, [*rows, (0, size)])
            planner = DeviceLora(case.pool(torch.float32, DEVICE), 200)
            tokens = SLOTS + size
            plan = planner.plan(case.lora_rows(), tokens)
            assert plan.tiles.size == size
            assert int(plan.tiles.tiles[:, 2].sum()) == tokens
            assert sorted(plan.tiles.rows.tolist()) == list(range(tokens))


@pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")
def test_an_adapter_that_overflows_spoils_its_own_rows_only() -> None:
    with weights_as_the_model():
        used = {0: adapter(8, ALL), 1: adapter(8, ALL, scale=1e17), 2: adapter(8, ALL)}
        case = Case(used, [(1, 1), (0, 1), (2, 1), (None, 1)])
        planner = DeviceLora(case.pool(torch.float32, DEVICE), 4)
        x = normal(4, 12, dtype=torch.float32, seed=1)
        x[0] *= 1e10
        y = torch.zeros(4, 32, device=DEVICE)
        planner.plan(case.lora_rows(), 4).add(0, Product.QKV, x, y)
        assert not bool(y[0].isfinite().all())
        want = case.expected(Product.QKV, x.cpu(), torch.zeros(4, 32))
        assert_close("lora", y[1:] / 16, want[1:] / 16)
