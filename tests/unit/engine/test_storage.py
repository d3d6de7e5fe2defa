"""Where the paged cache puts things, against plain advanced indexing."""

import pytest
import torch

from common.kv_cache.storage import PagedKVCache, page_bytes_of, pages_in


def make(num_pages: int = 6) -> PagedKVCache:
    return PagedKVCache(
        num_pages=num_pages, num_layers=3, num_kv_heads=2, page_size=4, head_dim=8,
        dtype=torch.float32,
    )  # fmt: skip


def test_a_page_is_contiguous_over_all_layers() -> None:
    cache = make()
    assert cache.page_bytes == 3 * 2 * 2 * 4 * 8 * 4
    assert cache.tensor[1].is_contiguous()
    assert cache.base_address + 5 * cache.page_bytes == cache.tensor[5].data_ptr()
    assert (cache.num_pages, cache.device) == (6, torch.device("cpu"))


def test_store_writes_exactly_its_tokens() -> None:
    cache = make()
    pages, offsets = torch.tensor([5, 0, 2]), torch.tensor([3, 0, 1])
    kv = torch.randn(3, 6, 8)[:, 2:]
    want = torch.zeros_like(cache.tensor)
    want[pages, 1, :, :, offsets] = kv.reshape(3, 2, 2, 8)
    cache.store(1, cache.store_index(pages, offsets), kv)
    assert torch.equal(cache.tensor, want)


def test_gather_lays_pages_side_by_side() -> None:
    cache = make()
    cache.tensor.normal_()
    pages = torch.tensor([[5, 1], [0, 3], [2, 2]])
    for layer in range(3):
        gathered = cache.gather(layer, cache.gather_index(pages), 3)
        want = cache.tensor[pages, layer].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        assert torch.equal(gathered, want)


def test_clear_zeroes_whole_pages_and_no_other() -> None:
    cache = make()
    cache.tensor.fill_(1.0)
    cache.clear(torch.tensor([4, 1]))
    assert [bool(page.any()) for page in cache.tensor] == [True, False, True, True, False, True]


def test_pages_in_counts_whole_pages() -> None:
    shape = {"num_layers": 30, "num_kv_heads": 3, "page_size": 16, "head_dim": 64}
    page = page_bytes_of(**shape, dtype=torch.float16)
    assert page == 30 * 2 * 3 * 16 * 64 * 2
    assert pages_in(1.0, page) == (1 << 30) // page
    assert pages_in(page / (1 << 30), page) == 1
    with pytest.raises(ValueError, match="hold no KV page"):
        pages_in(1e-6, page)
