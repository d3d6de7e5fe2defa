"""Rotation and store: every token lands at its place, and nothing else is written."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.kernels.store import rotate_and_store
from common.engine.kernels.tuning import StoreConfig
from tests.kernels.precision import DEVICE, DTYPES, assert_close, normal, poisoned

MAX_POSITION = 64


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of [tokens, heads, head_dim] in float64."""
    wide = x.double()
    return wide * cos.double() + wide.roll(x.shape[-1] // 2, -1) * sin.double()


def rotation_rows(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) as `RopeTable.at`: the sine's first half negated."""
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    angles = positions[:, None] * inverse
    cos, sin = angles.cos(), angles.sin()
    both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return both[0][:, None].to(dtype), both[1][:, None].to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(1, 1), (4, 2), (3, 1), (8, 1)]),
    st.sampled_from([8, 16, 24]),
    st.sampled_from([4, 6, 16]),
    st.lists(st.integers(0, MAX_POSITION - 1) | st.none(), min_size=1, max_size=9, unique=True),
    st.sampled_from([StoreConfig(1), StoreConfig(4), None]),
)
def test_tokens_land_rotated_in_their_pages(
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    tokens: list[int | None],
    config: StoreConfig | None,
) -> None:
    num_heads, num_kv_heads = heads
    num_slots, pages_a_slot = 3, -(-MAX_POSITION // page_size)
    generator = torch.Generator().manual_seed(len(tokens))
    num_pages = num_slots * pages_a_slot
    table = torch.randperm(num_pages, generator=generator).view(num_slots, -1).to(DEVICE)
    slots = torch.tensor([-1 if p is None else p % num_slots for p in tokens], device=DEVICE)
    positions = torch.tensor([p or 0 for p in tokens], device=DEVICE)
    fused = normal(len(tokens), (num_heads + 2 * num_kv_heads) * head_dim + 16, dtype=dtype, seed=1)
    qkv = fused[:, 16:].view(len(tokens), -1, head_dim)  # a view with a stride of its own
    before = qkv.clone()
    rotation = rotation_rows(positions, head_dim, dtype)
    whole = poisoned(num_pages, 2, 2, num_kv_heads, page_size, head_dim, dtype=dtype)
    pool = whole[:, 1]

    rotate_and_store(qkv, rotation, pool, table, slots, positions, config=config)

    rotated = reference(before, *rotation)
    real = slots >= 0
    assert_close("rope", qkv[real, :num_heads], rotated[real, :num_heads])
    assert torch.equal(qkv[:, num_heads:], before[:, num_heads:]), "keys and values stay"
    assert torch.equal(qkv[~real], before[~real]), "padding was touched"
    assert whole[:, 0].isnan().all(), "another layer was touched"
    written = torch.zeros(num_pages, page_size, dtype=torch.bool)
    for row in real.nonzero().flatten().tolist():
        position = int(positions[row])
        page, offset = int(table[slots[row], position // page_size]), position % page_size
        keys, values = pool[page, 0, :, offset], pool[page, 1, :, offset]
        assert_close("rope", keys, rotated[row, num_heads : num_heads + num_kv_heads])
        assert torch.equal(values, before[row, num_heads + num_kv_heads :])
        written[page, offset] = True
    untouched = pool.permute(0, 3, 1, 2, 4)[~written.to(DEVICE)]
    assert untouched.isnan().all(), "a place that belongs to no token was written"
