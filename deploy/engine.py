"""What computes in a process: its part of the model, page pool, adapters' slots and runner.

Every rank of a node builds these in the same way; what only rank 0 has (scheduler, I/O, sampling)
is composed in `deploy/node.py`.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from common.config import NodeConfig
from common.engine.loader import LoadedModel, load_model
from common.engine.lora.pool import LoraPool
from common.engine.parallel.group import Group
from common.engine.parallel.shards import Shard
from common.engine.runner import ModelRunner
from common.grammar.store import GrammarStore
from common.kv_cache.storage import PagedKVCache, pages_in
from common.messages import Incarnation
from deploy.errors import StartupError
from transfer.nixl import NixlTransfer

log = logging.getLogger("node")


@dataclass(frozen=True, slots=True)
class Engine:
    """One rank's."""

    model: LoadedModel
    shard: Shard
    max_model_len: int
    cache: PagedKVCache
    slots: LoraPool
    runner: ModelRunner


def load(config: NodeConfig, folder: Path, group: Group) -> LoadedModel:
    """This rank's part of the model. Raises ModelError."""
    part = "" if group.size == 1 else f", part {group.rank + 1} of {group.size}"
    log.info("loading %s%s", folder, part)
    return load_model(folder, config.dtype, group=group)


def build(
    config: NodeConfig, model: LoadedModel, group: Group, grammars: GrammarStore | None = None
) -> Engine:
    """Everything that needs the model; the group is connected. Rank 0 alone has `grammars`, and
    draws.

    Raises StartupError.
    """
    shard = Shard.of(model.spec, group.rank, group.size)
    max_model_len = choose_max_model_len(config.max_model_len, model.spec.max_positions)
    cache = _make_cache(config, model, shard)
    slots = LoraPool(shard.local, model.dtype, config.max_loras_per_batch, config.max_lora_rank)
    runner = ModelRunner(
        model,
        cache,
        config.max_running_requests,
        max_model_len,
        slots,
        grammars,
        draws=group.rank == 0,
    )
    return Engine(model, shard, max_model_len, cache, slots, runner)


def choose_max_model_len(asked: int | None, limit: int) -> int:
    """The model's own limit, or what was asked if the model can do it."""
    if asked is None:
        return limit
    if asked > limit:
        raise StartupError(f"max_model_len: {asked} is more than the model's {limit} positions")
    return asked


class PageShape(TypedDict):
    num_layers: int
    page_size: int
    head_dim: int


def _make_cache(config: NodeConfig, model: LoadedModel, shard: Shard) -> PagedKVCache:
    """This rank's part of every page; all ranks have equally many pages."""
    spec = model.spec
    shape = PageShape(
        num_layers=spec.num_layers, page_size=config.page_size, head_dim=spec.head_dim
    )
    # Ranks beyond the number of KV heads hold copies.
    heads_of_all = max(spec.num_kv_heads, shard.size)
    try:
        num_pages = config.num_pages or pages_in(
            config.kv_cache_gib, **shape, num_kv_heads=heads_of_all, dtype=model.dtype
        )
        cache = PagedKVCache(
            num_pages=num_pages, **shape, num_kv_heads=len(shard.kv_heads), dtype=model.dtype
        )
    except (ValueError, RuntimeError, MemoryError) as error:
        raise StartupError(f"the page pool: {first_line(error)}") from error
    log.info(
        "page pool: %d pages of %d tokens, %.2f GiB",
        num_pages, config.page_size, num_pages * cache.page_bytes / (1 << 30),
    )  # fmt: skip
    return cache


def register(config: NodeConfig, engine: Engine, incarnation: Incarnation) -> NixlTransfer:
    """Register this rank's pool with NIXL. Raises StartupError."""
    cache, rank = engine.cache, engine.shard.rank
    name = f"{incarnation}-rank{rank}" if rank else incarnation
    params = parse_params(config.nixl_params)
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
        )
    except Exception as error:  # NIXL's own kinds, none of which tells more than its text
        raise StartupError(f"NIXL could not register the pool: {first_line(error)}") from error


def parse_params(given: tuple[str, ...] | list[str]) -> dict[str, str]:
    """`key=value` pairs. Raises StartupError."""
    params: dict[str, str] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise StartupError(f"nixl_params: {pair!r} is not key=value")
        params[key] = value
    return params


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
