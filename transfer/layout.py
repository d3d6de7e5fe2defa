"""Where the pages of a pool are, as the rows that NIXL takes for descriptors. Pure.

    base_address                                        page i is one contiguous part:
    |  page 0  |  page 1  |  ...  |  page num_pages-1 |   base_address + i * page_bytes

A page holds all layers, keys before values in each, and of each the heads of one rank:

    | layer 0 key: h h h h | layer 0 value: h h h h | layer 1 key: h h h h | ...

So where two ranks hold equal heads a page is one descriptor: all pages of both are described once
for each peer, and a write picks rows by index. Runs of adjacent pages are not merged here; NIXL
joins neighbours. Of a part of the heads a page is `num_layers * 2` rows, which each write describes
for its own pages: measured with 64 rows a page, that is 0.2 ms for 32 pages beside a post of 8 ms,
where describing all of 32,768 pages once took 0.6 s and 50 MB for each pair of ranks.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.messages import PeerMemory
from transfer.boxes import WORD_BYTES
from transfer.handshake import heads_of
from transfer.head_ranges import HeadRange

Rows = npt.NDArray[np.uint64]
"""[n, 3]: address, length in bytes, device id."""

Indices = npt.NDArray[np.int32]
"""[n]: page ids."""


def check_layout(memory: PeerMemory, num_layers: int) -> None:
    """Raises ValueError where a page cannot be so many layers of so many heads."""
    parts = num_layers * 2 * memory.num_heads
    if parts < 1 or memory.page_bytes % parts:
        raise ValueError(f"{memory.page_bytes} bytes a page are not {parts} equal parts")


def page_rows(memory: PeerMemory, pages: Sequence[int] | None = None) -> Rows:
    """The descriptors of whole pages, of all in the order of page ids if none are named."""
    ids = np.arange(memory.num_pages) if pages is None else np.asarray(pages)
    rows = np.empty((len(ids), 3), dtype=np.uint64)
    rows[:, 0] = _starts(memory, ids)
    rows[:, 1] = memory.page_bytes
    rows[:, 2] = memory.device_id
    return rows


def page_indices(pages: Sequence[int]) -> Indices:
    """Page ids as the index array that picks their rows."""
    return np.asarray(pages, dtype=np.int32)


def common_rows(
    source: PeerMemory,
    target: PeerMemory,
    num_layers: int,
    source_pages: Sequence[int],
    target_pages: Sequence[int],
) -> tuple[Rows, Rows]:
    """The descriptors of the heads that both pools hold, here and there: page by page, in each
    layer by layer, keys before values."""
    heads = heads_of(source).common(heads_of(target))
    assert heads is not None, "no peer is added that has none of them"
    return (
        _head_rows(source, num_layers, heads, source_pages),
        _head_rows(target, num_layers, heads, target_pages),
    )


def _head_rows(memory: PeerMemory, num_layers: int, heads: HeadRange, pages: Sequence[int]) -> Rows:
    stride = memory.page_bytes // (num_layers * 2)
    head_bytes = stride // memory.num_heads
    within = np.arange(num_layers * 2, dtype=np.uint64) * np.uint64(stride)
    within += np.uint64((heads.first - memory.first_head) * head_bytes)
    addresses = _starts(memory, np.asarray(pages))[:, None] + within[None, :]
    rows = np.empty((addresses.size, 3), dtype=np.uint64)
    rows[:, 0] = addresses.reshape(-1)
    rows[:, 1] = heads.count * head_bytes
    rows[:, 2] = memory.device_id
    return rows


def _starts(memory: PeerMemory, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Addresses of pages."""
    return np.uint64(memory.base_address) + ids.astype(np.uint64) * np.uint64(memory.page_bytes)


def word_rows(address: int, count: int) -> Rows:
    """The descriptors of `count` words of 8 bytes each in host memory."""
    rows = np.empty((count, 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(WORD_BYTES)
    rows[:, 1] = WORD_BYTES
    rows[:, 2] = 0
    return rows
