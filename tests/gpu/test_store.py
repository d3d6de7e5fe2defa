"""Rotating and storing on real shapes: what is stored is right, and nothing else is written."""

import pytest
import torch
from torch import Tensor

from tests.gpu.accuracy import assert_close
from tests.gpu.cases import DTYPES, LLAMA_8B, SMOLLM2, TINY, ragged, sized
from tests.gpu.paged import LAYER, Shape, make_sequences

SHAPES = sized([SMOLLM2, LLAMA_8B], [TINY])
SPANS = sized(
    [
        tuple((context, 1) for context in ragged(256, 4096)),
        ((0, 1), (0, 17), (16, 2048), (4095, 130)),
        ((32_000, 768),),
    ],
    [((0, 1), (2, 5))],
)


def rotation_rows(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) as `RopeTable.at` gives them: float32, the sine's first half negated."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
    angles = positions[:, None].float() * (500_000.0**-exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of [tokens, heads, head_dim] in float64."""
    wide = x.double()
    return wide * cos.double() + wide.roll(x.shape[-1] // 2, -1) * sin.double()


@pytest.mark.parametrize("spans", SPANS, ids=lambda spans: f"{len(spans)}x{spans[-1][1]}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_land_rotated_and_nothing_else_is_written(
    spans: tuple[tuple[int, int], ...], shape: Shape, dtype: torch.dtype, device: torch.device
) -> None:
    from common.engine.kernels.store import rotate_and_store

    sequences = make_sequences(shape, [start + n for start, n in spans], dtype, device)
    batch = sequences.batch(spans)
    tokens, cache = len(batch.slots), sequences.cache
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    fused = torch.randn(tokens, heads + 2 * kv_heads, shape.head_dim, device=device).to(dtype)
    qkv = fused.clone()
    rotation = tuple(part.to(dtype) for part in rotation_rows(batch.positions, shape.head_dim))
    cos, sin = rotation
    before = cache.tensor.clone()
    pages = batch.page_table[batch.slots, batch.positions // shape.page_size]
    offsets = batch.positions % shape.page_size
    assert bool((before[pages, LAYER, :, :, offsets] == before[pages, LAYER, :, :, offsets]).all())

    rotate_and_store(
        qkv, (cos, sin), cache.tensor[:, LAYER], batch.page_table, batch.slots, batch.positions
    )

    wanted = rotated(fused, cos, sin)
    assert_close("rotate", qkv[:, :heads], wanted[:, :heads])
    stored = cache.tensor[pages, LAYER, :, :, offsets]  # [tokens, 2, kv heads, head_dim]
    assert_close("rotate", stored[:, 0], wanted[:, heads : heads + kv_heads])
    assert torch.equal(stored[:, 1], fused[:, heads + kv_heads :])
    # Put back what was there: then the pool is as it was, NaN for NaN.
    cache.tensor[pages, LAYER, :, :, offsets] = before[pages, LAYER, :, :, offsets]
    same = (cache.tensor == before) | (cache.tensor.isnan() & before.isnan())
    assert bool(same.all()), "something else was written"
