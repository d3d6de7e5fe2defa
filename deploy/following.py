"""What a rank beside the first does with what rank 0 says; see `deploy.rank`."""

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from common.engine.cpu import set_num_threads
from common.engine.errors import ModelError
from common.engine.lora.loader import AdapterLoader
from common.engine.parallel.adapters import serve_adapters
from common.engine.parallel.following import FollowingRunner
from common.engine.parallel.group import RankGroup
from common.logs import setup_logging
from common.rank_channel import RankChannel, Topic
from deploy.engine import Engine, build, load
from deploy.errors import StartupError
from deploy.rank_messages import (
    Connect,
    End,
    Failed,
    FromRank,
    Loaded,
    Ready,
    Setup,
    ToRank,
    WarmUp,
    encode,
)
from deploy.registration import register
from deploy.runners import EngineRunner
from transfer.rank_transfer import serve_transfer

log = logging.getLogger("node")

Take = Callable[[], ToRank | bytes]
"""The next order of rank 0, a batch if it is bytes; waits for it."""


def follow(setup: Setup, channel: RankChannel, take: Take) -> int:
    """Start, serve until the end, and the exit code. A failed pass ends the process at once."""
    setup_logging(f"{setup.name}/{setup.rank}")
    with ExitStack() as stack:
        try:
            engine = _start(setup, channel, take, stack)
        except (ModelError, StartupError) as error:
            log.error("cannot start: %s", error)
            _say(channel, Failed(str(error)))
            return 2
        except Exception as error:
            log.exception("cannot start")
            _say(channel, Failed(f"{type(error).__name__}: {error}"))
            return 2
        _serve(engine.runner, take)
    return 0


def _start(setup: Setup, channel: RankChannel, take: Take, stack: ExitStack) -> Engine:
    config = setup.config
    set_num_threads(config.threads)
    group = RankGroup(setup.rank, config.tp)
    model = load(config, Path(setup.model), group)
    _say(channel, Loaded())
    order = take()
    assert isinstance(order, Connect), f"{order!r} came before the ranks were connected"
    group.connect(model.device, order.port, config.rank_timeout_s)
    stack.callback(group.close)
    engine = build(config, model, group)
    transfer = register(config, engine, setup.incarnation)
    stack.callback(transfer.close)
    serve_transfer(channel, transfer)
    adapters = AdapterLoader(engine.shard, engine.slots)
    stack.callback(adapters.close)
    serve_adapters(channel, adapters)
    _say(channel, Ready(*transfer.memories))
    return engine


def _serve(runner: EngineRunner, take: Take) -> None:
    """Everything in the order in which rank 0 does it too, until the end."""
    following = FollowingRunner(runner)
    while True:
        order = take()
        try:
            match order:
                case bytes():
                    following.run(order)
                case WarmUp():
                    runner.warm_up()
                case End():
                    following.land()
                    return
                case _:
                    raise AssertionError(f"{order} came while serving")
        except Exception:
            # The others are in the middle of the same step, and nothing brings all together again.
            log.critical("a step failed: this node ends", exc_info=True)
            os._exit(1)


def _say(channel: RankChannel, message: FromRank) -> None:
    channel.send(Topic.CONTROL, encode(message))
