"""The stage beside a pool in host memory: whole pages in, heads out, and nothing else touched."""

import numpy as np
import pytest
import torch

from common.engine.page_stage import PageStage, slots_in
from common.kv_cache.storage import PagedKVCache


def pool(dtype: torch.dtype, num_heads: int = 4) -> PagedKVCache:
    cache = PagedKVCache(
        num_pages=6, num_layers=2, num_kv_heads=num_heads, page_size=4, head_dim=8, dtype=dtype
    )
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_slot_has_the_bytes_of_a_page(dtype: torch.dtype) -> None:
    cache = pool(dtype)
    stage = PageStage(cache, 3)
    assert stage.fetch([5, 1], [2, 0])()
    ring = np.frombuffer(stage.buffer, np.uint8).reshape(3, cache.page_bytes)
    for page, slot in ((5, 2), (1, 0)):
        content = cache.tensor[page].contiguous().view(torch.uint8).numpy()
        assert (ring[slot] == content.reshape(-1)).all()
    assert not ring[1].any()
    assert stage.address == ring.ctypes.data
    assert len(stage.buffer) == 3 * cache.page_bytes


@pytest.mark.parametrize(("first", "count"), [(0, 4), (0, 2), (1, 2), (3, 1)])
def test_only_the_heads_that_came_are_put(first: int, count: int) -> None:
    cache = pool(torch.float32)
    stage = PageStage(cache, 3)
    stage.fetch([2], [1])
    sent = cache.tensor[2].clone()
    before = cache.tensor.clone()
    assert stage.put([1], [4], first, count)()
    stage.finish()
    heads = slice(first, first + count)
    assert torch.equal(cache.tensor[4][:, :, heads], sent[:, :, heads])
    before[4][:, :, heads] = sent[:, :, heads]
    assert torch.equal(cache.tensor, before)


def test_writes_of_a_library_are_seen() -> None:
    cache = pool(torch.float32)
    stage = PageStage(cache, 2)
    stage.buffer[cache.page_bytes :] = bytes(cache.page_bytes)
    stage.put([1], [3], 0, 4)
    assert not cache.tensor[3].any()
    assert cache.tensor[2].any()


def test_whole_slots_are_counted() -> None:
    assert slots_in(1.0, 2 << 20) == 512
    assert slots_in(0.5, (1 << 30) + 1) == 0
