"""A node's page pool: how large, by which flag, and what is said when it cannot be had.

--num-pages  >  --kv-cache-gib  >  on a GPU --mem-fraction, on a CPU 1 GiB
"""

import logging
from collections.abc import Callable
from typing import TypedDict

from common.config import NodeConfig
from common.engine.errors import MemoryPlanError
from common.engine.loader import LoadedModel
from common.engine.memory_plan import MemoryGauge, plan_pages, read_memory
from common.engine.parallel.group import Group
from common.engine.parallel.shards import Shard
from common.engine.profiling import PROFILED_PAGES
from common.kv_cache.storage import GIB, PagedKVCache, page_bytes_of, pages_in
from deploy.errors import StartupError

log = logging.getLogger("node")

DEFAULT_GIB = 1.0

Profile = Callable[[PagedKVCache], None]
"""Runs the largest batch over a pool of `PROFILED_PAGES`, and keeps nothing of what it made."""


class PageShape(TypedDict):
    num_layers: int
    page_size: int
    head_dim: int


def make_page_pool(
    config: NodeConfig,
    model: LoadedModel,
    shard: Shard,
    group: Group,
    gauge: MemoryGauge | None,
    profile: Profile,
    adapters: int = 0,
) -> PagedKVCache:
    """This rank's part of every page, on the model's device; all ranks have equally many pages.

    `gauge` is None for host memory, `adapters` the bytes that their slots will take on this rank's
    device. All ranks profile at the same time, as a batch is computed by
    all of them together.

    Raises:
        StartupError: not one page was asked for, or the memory is not there.
        MemoryPlanError: nothing is left for pages; the message has all the numbers.
    """
    spec = model.spec
    shape = PageShape(
        num_layers=spec.num_layers, page_size=config.page_size, head_dim=spec.head_dim
    )

    def make(num_pages: int) -> PagedKVCache:
        return PagedKVCache(
            num_pages=num_pages,
            **shape,
            num_kv_heads=len(shard.kv_heads),
            dtype=model.dtype,
            device=model.device,
            scratch=model.device.type == "cuda",  # its runner pads batches
        )

    try:
        if config.num_pages is not None:
            num_pages = config.num_pages
        elif config.kv_cache_gib is not None or gauge is None:
            # Ranks beyond the number of KV heads hold copies.
            heads_of_all = max(spec.num_kv_heads, shard.size)
            page_bytes = page_bytes_of(**shape, num_kv_heads=heads_of_all, dtype=model.dtype)
            num_pages = pages_in(config.kv_cache_gib or DEFAULT_GIB, page_bytes)
        else:
            readings = read_memory(gauge, lambda: profile(make(PROFILED_PAGES)))
            own = page_bytes_of(**shape, num_kv_heads=len(shard.kv_heads), dtype=model.dtype)
            where = str(model.device)
            num_pages = _together(
                group,
                lambda: plan_pages(
                    readings, config.mem_fraction, own, adapters=adapters, device=where
                ),
            )
        cache = make(num_pages)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise StartupError(f"the page pool: {first_line(error)}") from error
    log.info(
        "page pool: %d pages of %d tokens, %.2f GiB on %s",
        num_pages, config.page_size, num_pages * cache.page_bytes / GIB, model.device,
    )  # fmt: skip
    return cache


def _together(group: Group, plan: Callable[[], int]) -> int:
    """What all ranks have memory for; every one of them hears of it where one has none.

    Raises StartupError, and MemoryPlanError where it is this one.
    """
    try:
        mine = plan()
    except MemoryPlanError:
        group.least(0)
        raise
    least = group.least(mine)
    if not least:
        raise StartupError("the page pool: no memory for it where another rank of this node is")
    return least


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
