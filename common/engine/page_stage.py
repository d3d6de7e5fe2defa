"""The host memory through which a pool's pages go where the network cannot reach the pool.

Implements `transfer.stage.PageStage`. On a GPU the ring is pinned and copies run on a stream of
their own, beside the kernels; an event behind each tells when it is over. In host memory a copy is
done when it has begun, which is what tests on machines without a GPU run.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.kv_cache.storage import GIB, PagedKVCache

Ready = Callable[[], bool]


class PageStage:
    """A ring of `num_slots` pages beside `cache`; used by one thread at a time.

    On a GPU a page may be read only once the kernels that fill it have finished: no copy waits for
    any. Raises RuntimeError where the ring's memory cannot be had.
    """

    def __init__(self, cache: PagedKVCache, num_slots: int) -> None:
        pool = cache.tensor
        self._pool = pool
        on_gpu = pool.device.type == "cuda"
        self._ring = torch.zeros((num_slots, *pool.shape[1:]), dtype=pool.dtype, pin_memory=on_gpu)
        self._stream: torch.cuda.Stream | None = None
        if on_gpu:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    @property
    def num_slots(self) -> int:
        return self._ring.shape[0]

    @property
    def address(self) -> int:
        return self._ring.data_ptr()

    @property
    def buffer(self) -> memoryview:
        array = (ctypes.c_uint8 * self._ring.nbytes).from_address(self.address)
        return memoryview(array).cast("B")

    def fetch(self, pages: Sequence[int], slots: Sequence[int]) -> Ready:
        """Begin to copy pages into slots."""
        return self._copy(
            [(self._pool[page], self._ring[slot]) for page, slot in zip(pages, slots, strict=True)]
        )

    def put(self, slots: Sequence[int], pages: Sequence[int], first: int, count: int) -> Ready:
        """Begin to copy heads [first, first + count) of slots into pages."""

        def part(page: Tensor) -> Tensor:
            # [layers, keys and values, heads, tokens, head_dim]; all heads are one piece of memory.
            return page if count == page.shape[2] else page[:, :, first : first + count]

        return self._copy(
            [
                (part(self._ring[slot]), part(self._pool[page]))
                for slot, page in zip(slots, pages, strict=True)
            ]
        )

    def finish(self) -> None:
        """Wait for every copy that was begun."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Ready:
        if self._stream is None:
            for source, target in pairs:
                target.copy_(source)
            return _at_once
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        query: Ready = done.query
        return query


def slots_in(gib: float, page_bytes: int) -> int:
    """How many slots a ring of `gib` GiB has."""
    return int(gib * GIB) // page_bytes


def _at_once() -> bool:
    return True
