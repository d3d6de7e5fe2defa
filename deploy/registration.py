"""A rank's pool becomes writable to peers: as it is, or through a stage in host memory.

`--transfer-staging on` stages, `off` does not. `auto` registers host memory as it is, and a GPU's
where NIXL turns out to reach it: one page is copied, and looked at.
"""

import logging
from functools import partial
from uuid import uuid4

from common.config import NodeConfig
from common.engine.cuda.runner import CudaModelRunner
from common.engine.device import activate
from common.engine.page_stage import PageStage, slots_in
from common.kv_cache.storage import PagedKVCache
from common.messages import Incarnation, PeerMemory
from deploy.engine import Engine, parse_params
from deploy.errors import StartupError
from deploy.page_pool import first_line
from transfer.nixl import NixlAgent, NixlTransfer
from transfer.reach import reach_problem
from transfer.slots import LEAST_SLOTS

log = logging.getLogger("node")


def register(config: NodeConfig, engine: Engine, incarnation: Incarnation) -> NixlTransfer:
    """Register this rank's pool with NIXL, before it is in use. Raises StartupError."""
    cache, rank = engine.cache, engine.shard.rank
    name = f"{incarnation}-rank{rank}" if rank else incarnation
    params = parse_params(config.nixl_params)
    stage = _choose_stage(config, cache, params)
    fence = engine.runner.fence if isinstance(engine.runner, CudaModelRunner) else None
    try:
        return NixlTransfer(
            cache.base_address,
            cache.num_pages,
            cache.page_bytes,
            name,
            params,
            num_layers=cache.num_layers,
            first_head=engine.shard.kv_heads.start,
            num_heads=cache.num_kv_heads,
            kind=cache.memory_kind,
            device_id=cache.device.index or 0,
            fence=fence,
            stage=stage,
            prepare_thread=partial(activate, cache.device),
        )
    except Exception as error:  # NIXL's own kinds, none of which tells more than its text
        raise StartupError(f"NIXL could not register the pool: {first_line(error)}") from error


def _choose_stage(
    config: NodeConfig, cache: PagedKVCache, params: dict[str, str]
) -> PageStage | None:
    on_gpu = cache.device.type != "cpu"
    if config.transfer_staging == "off" or (config.transfer_staging == "auto" and not on_gpu):
        return None
    stage = make_stage(config, cache)
    if config.transfer_staging == "auto":
        problem = direct_problem(cache, stage, params)
        if problem is None:
            return None
        log.warning("NIXL does not reach %s, pages go through host memory: %s",
                    cache.device, problem)  # fmt: skip
    log.info("staging: %d pages in host memory", stage.num_slots)
    return stage


def make_stage(config: NodeConfig, cache: PagedKVCache) -> PageStage:
    """The ring of `staging_gib`. Raises StartupError."""
    num_slots = slots_in(config.staging_gib, cache.page_bytes)
    if num_slots < LEAST_SLOTS:
        size = f"{cache.page_bytes / (1 << 20):.2f} MiB"
        raise StartupError(
            f"staging_gib: {config.staging_gib:g} GiB hold {num_slots} pages of {size}, "
            f"at least {LEAST_SLOTS} are needed"
        )
    try:
        return PageStage(cache, num_slots)
    except (RuntimeError, MemoryError) as error:
        raise StartupError(f"staging_gib: {first_line(error)}") from error


def direct_problem(cache: PagedKVCache, stage: PageStage, params: dict[str, str]) -> str | None:
    """Why NIXL cannot copy pages of the pool, which is not in use yet; None if it can.

    Pages 0 and 1 are zero again afterwards.
    """
    if cache.num_pages < 2:
        return "a pool of one page cannot be tried"
    memory = PeerMemory(
        agent_name=f"pdserve-try-{uuid4().hex}",
        metadata=b"",
        base_address=cache.base_address,
        num_pages=cache.num_pages,
        page_bytes=cache.page_bytes,
        first_head=0,
        num_heads=cache.num_kv_heads,
        kind=cache.memory_kind,
        device_id=cache.device.index or 0,
    )
    pattern = bytes(range(1, 252)) * (cache.page_bytes // 251 + 1)
    size = cache.page_bytes
    stage.buffer[:size] = pattern[:size]
    stage.put([0], [0], 0, cache.num_kv_heads)
    stage.finish()
    problem = reach_problem(memory, lambda named: NixlAgent(named, cache.num_layers, params))
    stage.fetch([1], [1])
    stage.finish()
    if problem is None and stage.buffer[size : 2 * size] != pattern[:size]:
        problem = "other bytes arrived than were sent"
    stage.buffer[: 2 * size] = bytes(2 * size)
    stage.put([0, 1], [0, 1], 0, cache.num_kv_heads)
    stage.finish()
    return problem
