"""Where the pages of a pool are, as the rows that NIXL takes for descriptors. Pure.

    base_address                                        page i is one contiguous piece:
    |  page 0  |  page 1  |  ...  |  page num_pages-1 |   base_address + i * page_bytes

A page holds all layers, so one page is one descriptor. Runs of adjacent pages are not merged here:
both sides are described once per peer, a write picks rows by index, and NIXL joins neighbours.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint64]
"""[num_pages, 3]: address, length in bytes, device id."""

Indices = npt.NDArray[np.int32]
"""[n]: page ids."""


def page_rows(base_address: int, num_pages: int, page_bytes: int, device_id: int = 0) -> Rows:
    """The descriptors of every page of a pool, in the order of page ids."""
    rows = np.empty((num_pages, 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(base_address) + np.arange(num_pages, dtype=np.uint64) * np.uint64(
        page_bytes
    )
    rows[:, 1] = page_bytes
    rows[:, 2] = device_id
    return rows


def page_indices(pages: Sequence[int]) -> Indices:
    """Page ids as the index array that picks their rows."""
    return np.asarray(pages, dtype=np.int32)
