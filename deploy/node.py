"""The composition root of a node, and the only code that looks at `DisaggregationMode`.

    ranks ─▶ model ─▶ page pool ─▶ transfer (registered) ─▶ I/O thread ─▶ scheduler ─▶ event loop
               └────▶ loader of adapters, compiler of grammars     └─ Hello to the routers, at last

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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, assert_never
from uuid import uuid4

from common.config import DecodeConfig, NodeConfig, PrefillConfig
from common.credentials import ClusterKeys
from common.engine.cpu import set_num_threads
from common.engine.cuda.mortal import MortalRunner
from common.engine.device import answers
from common.engine.errors import ModelError
from common.engine.lora.loader import AdapterLoader
from common.engine.parallel.adapters import SharedAdapters
from common.engine.parallel.leading import LeadingRunner
from common.engine.spec import fingerprint
from common.event_loop import EventLoop
from common.gatekeeper import NoCurve
from common.grammar.compiler import GrammarCompiler
from common.grammar.store import GrammarStore
from common.grammar.vocabulary import load_vocabulary
from common.kv_cache.storage import PagedKVCache
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
from common.steps import Runner
from decode_node.scheduler import DecodeScheduler
from deploy.access import node_keys
from deploy.default_model import resolve_model
from deploy.engine import Engine, build, load, parse_params
from deploy.errors import StartupError
from deploy.ranks import RankProcesses
from deploy.registration import register
from prefill_node.scheduler import PrefillScheduler
from transfer.rank_transfer import RemoteTransfer
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
    parse_params(config.nixl_params)
    identity = NodeIdentity(
        role=mode, name=name, incarnation=f"{mode}-{uuid4().hex}", pid=os.getpid()
    )
    set_num_threads(config.threads)
    folder = resolve_model(config.model)
    ranks = RankProcesses(config, folder, identity)
    stack.callback(ranks.close)
    model = load(config, folder, ranks.group)
    grammars = GrammarStore(lambda: load_vocabulary(folder, model.spec.vocab_size))
    ranks.connect(model)
    with ranks.blaming():
        engine = build(config, model, ranks.group, grammars)
        transfer = _register(config, engine, identity, ranks, stack)
        runner = _warm_up(engine, ranks)

    io = NodeIO(identity, _io_settings(config, keys), half.peers)
    io.start()
    stack.callback(io.close)
    # Before the side channel: an address that refuses connections says that its process, and any
    # rank of it, writes no more. (Closing twice is harmless; the first entries are for an `io` that
    # does not start.)
    stack.callback(ranks.close)
    stack.callback(transfer.close)
    transfer.start(io.wake)
    adapters = SharedAdapters(AdapterLoader(engine.shard, engine.slots), ranks.channels)
    stack.callback(adapters.close)
    adapters.start(io.wake)
    compiler = GrammarCompiler(grammars)
    stack.callback(compiler.close)
    compiler.start(io.wake)

    agreed = fingerprint(model.spec, model.digest, model.dtype_name, config.page_size)
    settings = _scheduler_settings(config, identity, agreed, engine)
    scheduler = half.make_scheduler(settings, engine.cache)
    loop = EventLoop(scheduler, runner, transfer, adapters, compiler, io)
    registration = Registration(
        served_model_name=config.served_model_name or config.model.rstrip("/").rpartition("/")[2],
        fingerprint=agreed,
        memories=transfer.memories,
        max_model_len=engine.max_model_len,
        max_running_requests=config.max_running_requests,
    )
    ranks.serve()
    ending.through(io)
    io.announce(registration)
    log.info("ready after %.1f s: HTTP at %s", time.monotonic() - began, io.url)
    return loop


def _register(
    config: NodeConfig,
    engine: Engine,
    identity: NodeIdentity,
    ranks: RankProcesses,
    stack: ExitStack,
) -> ShardedTransfer:
    """The transfer of all ranks as one."""
    local = register(config, engine, identity.incarnation)
    stack.callback(local.close)
    remote = [
        RemoteTransfer(channel, memory)
        for channel, memory in zip(ranks.channels, ranks.memories(), strict=True)
    ]
    transfer = ShardedTransfer([local, *remote], identity.incarnation)
    stack.callback(transfer.close)
    return transfer


def _warm_up(engine: Engine, ranks: RankProcesses) -> Runner:
    """What the event loop runs, after its first passes."""
    ranks.begin_warm_up()
    engine.runner.warm_up()
    if not ranks.channels:
        if engine.model.device.type == "cpu":
            return engine.runner
        return MortalRunner(engine.runner, partial(answers, engine.model.device), ranks.give_up)
    return LeadingRunner(engine.runner, ranks.tell_batch, ranks.give_up)


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
    engine: Engine,
) -> SchedulerSettings:
    return SchedulerSettings(
        incarnation=identity.incarnation,
        fingerprint=agreed,
        num_pages=engine.cache.num_pages,
        page_size=config.page_size,
        vocab_size=engine.model.spec.vocab_size,
        max_model_len=engine.max_model_len,
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
