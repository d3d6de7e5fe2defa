"""The just-in-time conversion computes what a plain product computes."""

import pytest
import torch

from common.engine.linear import Linear, LinearFactory, UpcastLinear


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scratch_rows", [7, 50, 200])
def test_upcast_linear_equals_a_float32_product(rows: int, bias: bool, scratch_rows: int) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(50, 24).bfloat16()
    offset = torch.randn(50).bfloat16() if bias else None
    x = torch.randn(rows, 24).bfloat16()
    linear = UpcastLinear(weight, offset, torch.empty(scratch_rows * 24 + 5))
    want = x.float() @ weight.float().T + (0 if offset is None else offset.float())
    got = linear(x)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
    wide = UpcastLinear(weight, offset, torch.empty(scratch_rows * 24 + 5), wide=True)
    torch.testing.assert_close(wide(x.float()).float(), want, rtol=1e-2, atol=1e-2)


def test_the_factory_converts_only_where_it_pays() -> None:
    weight = torch.zeros(4, 4)
    slow = LinearFactory(native_bfloat16=False)
    assert type(slow.make(weight)) is Linear
    assert type(slow.make(weight.bfloat16())) is UpcastLinear
    assert type(LinearFactory(native_bfloat16=True).make(weight.bfloat16())) is Linear
