"""The composition root of a node, and the only code that looks at `DisaggregationMode`.

    model ─▶ page pool ─▶ transfer (pool registered) ─▶ I/O thread ─▶ scheduler ─▶ event loop
      └────▶ loader of adapters, compiler of grammars      └─ Hello to the routers, last of all

The mode selects the scheduler subclass and the node's side of the peer link; from then on nothing
asks which half of a request this process serves. A router hears of a node only when its model, pool
and transfer are ready. Import this after `deploy.process.prepare`: torch and UCX read their
environment early.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypedDict, assert_never
from uuid import uuid4

from common.config import DecodeConfig, NodeConfig, PrefillConfig
from common.credentials import ClusterKeys
from common.engine.cpu import set_num_threads
from common.engine.errors import ModelError
from common.engine.loader import LoadedModel, load_model
from common.engine.lora.loader import AdapterLoader
from common.engine.lora.pool import LoraPool
from common.engine.parallel.shards import Shard
from common.engine.runner import ModelRunner
from common.engine.spec import fingerprint
from common.event_loop import EventLoop
from common.gatekeeper import NoCurve
from common.grammar.compiler import GrammarCompiler
from common.grammar.store import GrammarStore
from common.grammar.vocabulary import load_vocabulary
from common.kv_cache.storage import PagedKVCache, pages_in
from common.logs import setup_logging
from common.messages import Fingerprint
from common.modes import DisaggregationMode
from common.node_io.peer_dialler import PeerDialler
from common.node_io.peer_server import PeerServer
from common.node_io.peer_side import PeerSide
from common.node_io.settings import CannotBind, IOSettings, NodeIdentity, Registration
from common.node_io.thread import NodeIO
from common.scheduler import Scheduler
from common.settings import SchedulerSettings
from decode_node.scheduler import DecodeScheduler
from deploy.access import node_keys
from deploy.default_model import resolve_model
from deploy.errors import StartupError
from prefill_node.scheduler import PrefillScheduler
from transfer.nixl import NixlTransfer
from transfer.sharded import ShardedTransfer

log = logging.getLogger("node")

NodeScheduler = Scheduler[Any]


@dataclass(frozen=True, slots=True)
class Half:
    """What differs between the two roles."""

    peers: PeerSide
    make_scheduler: Callable[[SchedulerSettings, PagedKVCache], NodeScheduler]


def select_half(mode: DisaggregationMode, config: NodeConfig) -> Half:
    """The one look at the mode."""
    match mode:
        case DisaggregationMode.PREFILL:
            assert isinstance(config, PrefillConfig)
            return Half(
                PeerServer(config.side_channel_port),
                lambda settings, cache: PrefillScheduler(settings, cache.head_bytes),
            )
        case DisaggregationMode.DECODE:
            assert isinstance(config, DecodeConfig)
            reserve_pages, local_chunk = config.reserve_pages, config.local_chunk_size
            return Half(
                PeerDialler(config.lease_s),
                lambda settings, _: DecodeScheduler(settings, reserve_pages, local_chunk),
            )
        case _:
            assert_never(mode)


def run_node(mode: DisaggregationMode, config: NodeConfig) -> int:
    """Serve until asked to leave, by a signal or over the wire, and drained; the exit code.

    A second signal, or the drain's bound, ends it with work left, which the log then names. The
    exit code is 0 all the same: what was asked for was done. It is 1 when this node's I/O fails.

    Raises:
        StartupError: the model, a port, the pool or the transfer could not be had.
    """
    name = config.name or f"{mode}-{socket.gethostname()}-{os.getpid()}"
    setup_logging(name)
    keys = node_keys(config, os.environ)
    ending = Ending()
    try:
        with ExitStack() as stack:
            loop = _compose(mode, config, keys, name, ending, stack)
            loop.run()
            log.info("ending")
    except KeyboardInterrupt:
        log.info("asked to end while starting")
    except (ModelError, CannotBind, NoCurve) as error:
        raise StartupError(str(error)) from error
    return 1 if ending.io_failed else 0


class Ending:
    """SIGTERM and SIGINT: while starting they break off, afterwards the first drains this node,
    the second ends it between two steps, and a third kills it."""

    def __init__(self) -> None:
        self.asked = False
        self._io: NodeIO | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def through(self, io: NodeIO) -> None:
        """From now on end the loop that `io` feeds, between two steps."""
        self._io = io
        if self.asked:
            io.ask_to_end()

    @property
    def io_failed(self) -> bool:
        """Whether nobody asked: the node lost its sockets."""
        return self._io is not None and self._io.failed

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if self._io is None:
            raise KeyboardInterrupt
        if again:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
        self._io.ask_to_end(at_once=again)


# ---------------------------------------------------------------- the parts, in order


def _compose(
    mode: DisaggregationMode,
    config: NodeConfig,
    keys: ClusterKeys | None,
    name: str,
    ending: Ending,
    stack: ExitStack,
) -> EventLoop:
    """Build everything in the order of the module's picture; `stack` takes it down again."""
    began = time.monotonic()
    half = select_half(mode, config)
    nixl_params = parse_params(config.nixl_params)
    identity = NodeIdentity(
        role=mode, name=name, incarnation=f"{mode}-{uuid4().hex}", pid=os.getpid()
    )
    set_num_threads(config.threads)
    folder = resolve_model(config.model)
    log.info("loading %s", folder)
    model = load_model(folder, config.dtype)
    max_model_len = choose_max_model_len(config.max_model_len, model.spec.max_positions)
    cache = _make_cache(config, model)
    slots = LoraPool(model.spec, model.dtype, config.max_loras_per_batch, config.max_lora_rank)
    grammars = GrammarStore(lambda: load_vocabulary(folder, model.spec.vocab_size))
    runner = ModelRunner(model, cache, config.max_running_requests, max_model_len, slots, grammars)
    runner.warm_up()

    transfer = _register(nixl_params, cache, identity)
    stack.callback(transfer.close)
    io = NodeIO(identity, _io_settings(config, keys), half.peers)
    io.start()
    stack.callback(io.close)
    # Before the side channel: an address that refuses connections says that its process writes no
    # more. (Closing twice is harmless; the first entry is for an `io` that does not start.)
    stack.callback(transfer.close)
    transfer.start(io.wake)
    adapters = AdapterLoader(Shard.of(model.spec), slots)
    stack.callback(adapters.close)
    adapters.start(io.wake)
    compiler = GrammarCompiler(grammars)
    stack.callback(compiler.close)
    compiler.start(io.wake)

    agreed = fingerprint(model.spec, model.digest, model.dtype_name, config.page_size)
    settings = _scheduler_settings(config, identity, agreed, cache, model, max_model_len)
    loop = EventLoop(half.make_scheduler(settings, cache), runner, transfer, adapters, compiler, io)
    registration = Registration(
        served_model_name=config.served_model_name or config.model.rstrip("/").rpartition("/")[2],
        fingerprint=agreed,
        memories=transfer.memories,
        max_model_len=max_model_len,
        max_running_requests=config.max_running_requests,
    )
    ending.through(io)
    io.announce(registration)
    log.info("ready after %.1f s: HTTP at %s", time.monotonic() - began, io.url)
    return loop


def choose_max_model_len(asked: int | None, limit: int) -> int:
    """The model's own limit, or what was asked if the model can do it."""
    if asked is None:
        return limit
    if asked > limit:
        raise StartupError(f"max_model_len: {asked} is more than the model's {limit} positions")
    return asked


class PageShape(TypedDict):
    num_layers: int
    num_kv_heads: int
    page_size: int
    head_dim: int


def _make_cache(config: NodeConfig, model: LoadedModel) -> PagedKVCache:
    spec = model.spec
    shape = PageShape(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        page_size=config.page_size,
        head_dim=spec.head_dim,
    )
    try:
        num_pages = config.num_pages or pages_in(config.kv_cache_gib, **shape, dtype=model.dtype)
        cache = PagedKVCache(num_pages=num_pages, **shape, dtype=model.dtype)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise StartupError(f"the page pool: {_first_line(error)}") from error
    log.info(
        "page pool: %d pages of %d tokens, %.2f GiB",
        num_pages, config.page_size, num_pages * cache.page_bytes / (1 << 30),
    )  # fmt: skip
    return cache


def _register(
    params: dict[str, str], cache: PagedKVCache, identity: NodeIdentity
) -> ShardedTransfer:
    try:
        local = NixlTransfer(
            cache.base_address,
            cache.num_pages,
            cache.page_bytes,
            identity.incarnation,
            params,
            num_layers=cache.num_layers,
            first_head=0,
            num_heads=cache.num_kv_heads,
        )
        return ShardedTransfer([local], identity.incarnation)
    except Exception as error:  # NIXL's own kinds, none of which tells more than its text
        raise StartupError(f"NIXL could not register the pool: {_first_line(error)}") from error


def parse_params(given: Sequence[str]) -> dict[str, str]:
    """`key=value` pairs. Raises StartupError."""
    params: dict[str, str] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise StartupError(f"nixl_params: {pair!r} is not key=value")
        params[key] = value
    return params


def _io_settings(config: NodeConfig, keys: ClusterKeys | None) -> IOSettings:
    return IOSettings(
        host=config.host,
        port=config.port,
        routers=config.router,
        keys=keys,
        heartbeat_s=config.heartbeat_s,
        router_timeout_s=config.router_timeout_s,
        peer_timeout_s=config.peer_timeout_s,
        stuck_engine_s=config.stuck_engine_s,
    )


def _scheduler_settings(
    config: NodeConfig,
    identity: NodeIdentity,
    agreed: Fingerprint,
    cache: PagedKVCache,
    model: LoadedModel,
    max_model_len: int,
) -> SchedulerSettings:
    return SchedulerSettings(
        incarnation=identity.incarnation,
        fingerprint=agreed,
        num_pages=cache.num_pages,
        page_size=config.page_size,
        vocab_size=model.spec.vocab_size,
        max_model_len=max_model_len,
        max_running_requests=config.max_running_requests,
        chunk_size=config.chunk_size,
        prefix_cache=config.prefix_cache,
        twin_timeout_s=config.twin_timeout_s,
        transfer_timeout_s=config.transfer_timeout_s,
        lease_s=config.lease_s,
        longest_post_s=config.longest_post_s,
        drain_s=config.drain_s,
        max_queued_requests=config.max_queued_requests,
        unproven_s=config.unproven_s,
        stopped_peer_s=config.stopped_peer_s,
        max_loras_per_batch=config.max_loras_per_batch,
        max_loaded_loras=config.max_loaded_loras,
        lora_drain_wait_s=config.lora_drain_wait_s,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
