"""The tensors behind page ids: one pool, a page contiguous over all layers.

    tensor   [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
                  │          │       │        │           └─ token offset in the page
                  │          │       │        └─ a head range is contiguous inside a layer
                  │          │       └─ 0 key, 1 value
                  └─ a page is one transfer descriptor of `page_bytes` bytes

Reading and writing use flat-row indices (`index_select`, `index_copy_`), which on a CPU take less
than half the time of advanced indexing. The view of layer `l` starts at that layer's offset in
page 0, so that one index, computed once a step, serves every layer.
"""

import math

import torch
from torch import Tensor

GIB = 1 << 30


def page_bytes_of(
    *, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """The size of one page, over all layers."""
    return num_layers * 2 * num_kv_heads * page_size * head_dim * dtype.itemsize


def pages_in(gib: float, page_bytes: int) -> int:
    """How many whole pages fit into `gib` GiB; raises `ValueError` if none does."""
    pages = int(gib * GIB) // page_bytes
    if pages < 1:
        raise ValueError(f"{gib} GiB hold no KV page of {page_bytes} bytes")
    return pages


class PagedKVCache:
    """All keys and values of a node. Who owns a page is decided elsewhere (`PagePool`)."""

    def __init__(
        self,
        *,
        num_pages: int,
        num_layers: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        scratch: bool = False,
    ) -> None:
        """With `scratch` there is a page more, behind those that are counted and transferred: for
        rows that pad a batch."""
        self.scratch_page = num_pages if scratch else None
        shape = (num_pages + scratch, num_layers, 2, num_kv_heads, page_size, head_dim)
        # Zeroed, which also touches every page of memory now and not in the middle of a request.
        self.tensor: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.num_pages = num_pages
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.page_size = page_size
        self.head_dim = head_dim
        self.dtype = dtype
        self._tiles = [self._layer_rows(layer, page_size * head_dim) for layer in range(num_layers)]
        self._rows = [self._layer_rows(layer, head_dim) for layer in range(num_layers)]
        heads = torch.arange(2 * num_kv_heads, dtype=torch.int64, device=device)
        self._head_tiles = heads
        self._tiles_a_page = num_layers * 2 * num_kv_heads

    def _layer_rows(self, layer: int, width: int) -> Tensor:
        """The pool from `layer`'s part of page 0 on, as rows of `width` elements."""
        offset = layer * 2 * self.num_kv_heads * self.page_size * self.head_dim
        return self.tensor.view(-1)[offset:].view(-1, width)

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def memory_kind(self) -> str:
        """As transfers call it."""
        return "VRAM" if self.tensor.is_cuda else "DRAM"

    @property
    def page_bytes(self) -> int:
        return math.prod(self.tensor.shape[1:]) * self.tensor.element_size()

    @property
    def head_bytes(self) -> int:
        """What one KV head takes in a page: the same on every rank of a node, and of its peers."""
        return self.page_bytes // self.num_kv_heads

    @property
    def base_address(self) -> int:
        """Address of page 0; page `i` begins `i * page_bytes` behind it."""
        return self.tensor.data_ptr()

    def clear(self, pages: Tensor) -> None:
        """Zero whole pages (ids, int64), so that nothing of an earlier owner remains in them."""
        self.tensor.index_fill_(0, pages, 0)

    # ------------------------------------------------------------ writing

    def store_index(self, pages: Tensor, offsets: Tensor) -> Tensor:
        """Flat rows of tokens at (`pages`, `offsets`), both [tokens] int64, for `store`."""
        tiles = pages[:, None] * self._tiles_a_page + self._head_tiles
        return (tiles * self.page_size + offsets[:, None]).view(-1)

    def store(self, layer: int, index: Tensor, kv: Tensor) -> None:
        """Write `kv` [tokens, 2 * num_kv_heads, head_dim] (all keys, then all values)."""
        self._rows[layer].index_copy_(0, index, kv.reshape(-1, self.head_dim))

    # ------------------------------------------------------------ reading

    def gather_index(self, pages: Tensor) -> Tensor:
        """Flat tiles of `pages` [sequences, pages] int64, for `gather`."""
        tiles = (pages * self._tiles_a_page).view(1, pages.shape[0], 1, pages.shape[1])
        heads = self._head_tiles.view(2, 1, self.num_kv_heads, 1)
        return (tiles + heads).view(-1)

    def gather(self, layer: int, index: Tensor, num_sequences: int) -> Tensor:
        """Copy pages side by side: [2, num_sequences, num_kv_heads, tokens, head_dim].

        `tokens` counts whole pages; entry 0 of the first dimension are keys, 1 values.
        """
        tiles = self._tiles[layer].index_select(0, index)
        return tiles.view(2, num_sequences, self.num_kv_heads, -1, self.head_dim)
