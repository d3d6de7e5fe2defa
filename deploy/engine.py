"""What computes in a process: its part of the model, page pool, adapters' slots and runner.

Every rank of a node builds these in the same way; what only rank 0 has (scheduler, I/O, sampling)
is composed in `deploy/node.py`.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from common.config import NodeConfig
from common.engine.device import activate, choose_attention, choose_device
from common.engine.loader import LoadedModel, load_model
from common.engine.lora.pool import LoraPool
from common.engine.memory_plan import gauge_of
from common.engine.ops import choose_ops
from common.engine.parallel.group import Group
from common.engine.parallel.shards import Shard
from common.engine.profiling import largest_batch
from common.grammar.store import GrammarStore
from common.kv_cache.storage import PagedKVCache
from deploy.errors import StartupError
from deploy.page_pool import make_page_pool
from deploy.runners import EngineRunner, make_runner

DEFAULT_LORA_RANK = {"cpu": 256, "cuda": 64}
"""By where the slots are: unused ones cost a GPU as much as used ones. Of an 8B model eight slots
of rank 64 take 2.7 GB."""

log = logging.getLogger("node")


@dataclass(frozen=True, slots=True)
class Engine:
    """One rank's."""

    model: LoadedModel
    shard: Shard
    max_model_len: int
    cache: PagedKVCache
    slots: LoraPool
    runner: EngineRunner


def load(config: NodeConfig, folder: Path, group: Group) -> LoadedModel:
    """This rank's part of the model, on the rank's device. Raises ModelError."""
    device = choose_device(config.device, group.rank)
    attention = choose_attention(config.attention, device)
    activate(device)
    part = "" if group.size == 1 else f", part {group.rank + 1} of {group.size}"
    log.info("loading %s%s to %s", folder, part, device)
    return load_model(folder, config.dtype, device, choose_ops(attention), group=group)


def build(
    config: NodeConfig, model: LoadedModel, group: Group, grammars: GrammarStore | None = None
) -> Engine:
    """Everything that needs the model; the group is connected. Rank 0 alone has `grammars`, and
    draws.

    Raises StartupError, and ModelError where memory is short.
    """
    shard = Shard.of(model.spec, group.rank, group.size)
    max_model_len = choose_max_model_len(config.max_model_len, model.spec.max_positions)
    max_rank = config.max_lora_rank or DEFAULT_LORA_RANK[model.device.type]
    slots = LoraPool(shard.local, model.dtype, config.max_loras_per_batch, max_rank, model.device)
    draws = group.rank == 0

    def profile(cache: PagedKVCache) -> None:
        batch = largest_batch(
            chunk_size=config.chunk_size,
            max_running_requests=config.max_running_requests,
            max_model_len=max_model_len,
            page_size=config.page_size,
        )
        runner = make_runner(
            config, model, cache, max_model_len, slots, grammars, draws=draws, profiling=True
        )
        runner.launch(batch).result()

    gauge = gauge_of(model.device)
    cache = make_page_pool(config, model, shard, group, gauge, profile, slots.num_bytes)
    runner = make_runner(config, model, cache, max_model_len, slots, grammars, draws=draws)
    return Engine(model, shard, max_model_len, cache, slots, runner)


def choose_max_model_len(asked: int | None, limit: int) -> int:
    """The model's own limit, or what was asked if the model can do it."""
    if asked is None:
        return limit
    if asked > limit:
        raise StartupError(f"max_model_len: {asked} is more than the model's {limit} positions")
    return asked


def parse_params(given: tuple[str, ...] | list[str]) -> dict[str, str]:
    """`key=value` pairs. Raises StartupError."""
    params: dict[str, str] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise StartupError(f"nixl_params: {pair!r} is not key=value")
        params[key] = value
    return params
