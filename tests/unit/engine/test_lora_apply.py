"""Both ways of computing adapters equal the plain formula, for any mix of rows, slots and ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.errors import AdapterError
from common.engine.lora import apply
from common.engine.lora.adapter import Factors, LoraAdapter
from common.engine.lora.apply import Share, Singles, plan_lora
from common.engine.lora.pool import LoraPool, TargetWeights
from common.engine.lora.targets import Product
from tests.lora_cases import SLOTS, SPEC, TARGETS, WIDTHS, Case, adapter, cases

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans(), st.sampled_from(list(TOLERANCES)))
def test_any_mix_equals_the_formula(case: Case, never_singles: bool, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if never_singles:
            patched.setattr(apply, "MAX_SINGLE_RANK", 0)
        plan = plan_lora(case.pool(), case.lora_rows())
    if plan is None:
        assert all(slot is None for slot, _ in case.rows)
        return
    tokens = sum(count for _, count in case.rows)
    base = [slot is None for slot, count in case.rows for _ in range(count)]
    tolerance = TOLERANCES[dtype]
    for product, (width, out) in WIDTHS.items():
        x, y = torch.randn(tokens, width).to(dtype), torch.randn(tokens, out).to(dtype)
        want, before = case.expected(product, x, y), y.clone()
        plan.add(0, product, x, y)
        assert torch.equal(y[base], before[base]), "rows of the base model are not touched"
        largest = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance * largest)


def test_decode_rows_of_small_adapters_are_computed_together() -> None:
    all_of_them = [True] * 7
    case = Case(
        {slot: adapter(rank, all_of_them) for slot, rank in enumerate((8, 16, 72, 16, 8, 5))},
        [(4, 1), (0, 1), (None, 1), (2, 1), (3, 4), (5, 1), (1, 1)],
    )
    plan = plan_lora(case.pool(), case.lora_rows())
    assert plan is not None
    assert sorted(type(share).__name__ for share in plan.shares) == ["Share", "Share", "Singles",
                                                                     "Singles"]  # fmt: skip
    singles = [share for share in plan.shares if isinstance(share, Singles)]
    assert sum(len(share.offsets) for share in singles) == 4


def test_an_adapter_that_overflows_spoils_its_own_rows_only() -> None:
    all_of_them = [True] * 7
    case = Case(
        {
            0: adapter(8, all_of_them),
            1: adapter(8, all_of_them, scale=1e17),
            2: adapter(8, all_of_them),
        },
        [(1, 1), (0, 1), (2, 1), (None, 1)],
    )
    x = torch.randn(4, 12)
    x[0] *= 1e10
    plan = plan_lora(case.pool(), case.lora_rows())
    assert plan is not None
    assert any(isinstance(share, Singles) for share in plan.shares)
    y = torch.zeros(4, 32)
    plan.add(0, Product.QKV, x, y)
    assert not y[0].isfinite().all()
    want = case.expected(Product.QKV, x, torch.zeros(4, 32))
    torch.testing.assert_close(y[1:].double(), want[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factor", ["shrink", "expand"])
def test_what_a_float16_pool_cannot_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, factor: str
) -> None:
    monkeypatch.setattr("common.engine.lora.pool.is_native", lambda _: True)
    pool = LoraPool(SPEC, torch.float16, SLOTS, 256)
    good = adapter(8, [True] * 7)
    pool.place(0, good, lambda: None)
    target = TARGETS[3].module
    wild = {"shrink": good.layers[0][target].shrink.clone(), "expand": torch.zeros(12, 8)}
    wild[factor][3, 3] = 7e4
    layer = dict(good.layers[0]) | {target: Factors(**wild, scaling=1.0)}
    with pytest.raises(AdapterError, match="float16 cannot"):
        pool.place(1, LoraAdapter((layer,), 8, ""), lambda: None)
    with pytest.raises(KeyError):
        pool.slot(1)
    for weights in pool.layers[0][Product.OUTPUT]:
        assert weights.shrink.isfinite().all()
        assert weights.expand.isfinite().all()


def test_a_chunk_is_one_share() -> None:
    case = Case({0: adapter(4, [True] * 7)}, [(None, 3), (0, 5), (0, 1)])
    plan = plan_lora(case.pool(), case.lora_rows())
    assert plan is not None
    (share,) = plan.shares
    assert isinstance(share, Share)
    assert share.rows == slice(3, 9), "rows that follow each other are a view"


def test_what_no_adapter_changes_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query_value = [target.module in ("self_attn.q_proj", "self_attn.v_proj") for target in TARGETS]
    case = Case({0: adapter(4, query_value)}, [(0, 3)])
    plan = plan_lora(case.pool(), case.lora_rows())
    assert plan is not None
    gained: list[str] = []
    gain = Share.gain

    def watched(self: Share, weights: TargetWeights, x: Tensor) -> Tensor:
        gained.append(weights.target.module)
        return gain(self, weights, x)

    monkeypatch.setattr(Share, "gain", watched)
    for product, (width, out) in WIDTHS.items():
        plan.add(0, product, torch.randn(3, width), torch.randn(3, out))
    assert gained == ["self_attn.q_proj", "self_attn.v_proj"]
