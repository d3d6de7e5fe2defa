"""The just-in-time conversion computes what a plain product computes."""

import pytest
import torch

from common.engine.linear import Linear, LinearFactory, UpcastLinear


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scratch_rows", [7, 50, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_upcast_linear_equals_a_float32_product(
    rows: int, bias: bool, scratch_rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(50, 24).to(dtype)
    offset = torch.randn(50).to(dtype) if bias else None
    x = torch.randn(rows, 24).to(dtype)
    linear = UpcastLinear(weight, offset, torch.empty(scratch_rows * 24 + 5))
    want = x.float() @ weight.float().T + (0 if offset is None else offset.float())
    got = linear(x)
    assert got.dtype is dtype
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
    wide = UpcastLinear(weight, offset, torch.empty(scratch_rows * 24 + 5), wide=True)
    torch.testing.assert_close(wide(x.float()).float(), want, rtol=1e-2, atol=1e-2)


def test_the_factory_converts_only_where_it_pays() -> None:
    weight = torch.zeros(4, 4)
    slow = LinearFactory(native=False)
    assert type(slow.make(weight)) is Linear
    for narrow in (weight.bfloat16(), weight.half()):
        assert type(slow.make(narrow)) is UpcastLinear
        assert type(LinearFactory(native=True).make(narrow)) is Linear
