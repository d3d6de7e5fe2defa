"""The other ranks of a node whose model is shared (`--tp`), as rank 0 sees them.

Rank 0 is the node's own process: scheduler, I/O, sampling. The others are its children:

    start ─▶ load their parts ─▶ Loaded ─▶ connect ─▶ pool, transfer ─▶ Ready ─▶ warm-up ─▶ serving
                  │ Failed, or gone: the node does not start                            │
                  ▼                                                     gone: the node ends at once

A node that lost a rank can compute nothing, and whatever its transfers still do is over: it ends as
by `kill -9`, and its peers, its router and its supervisor see that and nothing else. Ranks end when
rank 0 does, however it does: the kernel kills them (PR_SET_PDEATHSIG), and their channel closes.
Nobody else ends them: they ignore what a terminal or a container's end sends to a whole group.
"""

import logging
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn, TypeVar

from common.config import NodeConfig
from common.engine.errors import ModelError
from common.engine.loader import LoadedModel
from common.engine.parallel.group import ALONE, Group, RankGroup, meeting_point
from common.messages import PeerMemory
from common.node_io.settings import NodeIdentity
from common.rank_channel import ChannelClosed, RankChannel, Topic
from deploy.errors import StartupError
from deploy.process import import_path, own_module, supervised_environment
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
    decode_from_rank,
    encode,
)
from deploy.supervisor import describe_exit

log = logging.getLogger("node")

NOTICE_S = 10.0
"""How long rank 0 may take to notice that a rank is gone while all are starting: it may be in the
middle of what only the lost one could end."""
BLAME_S = 2.0
"""How long a failure of rank 0's waits for the word of a rank that may be its cause."""
END_S = 20.0
"""How long ranks may take to end before they are killed."""
LOST_EXIT_CODE = 1

Said = TypeVar("Said", Loaded, Ready)


class RankProcess:
    """One of them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = Pipe()
        self._process = subprocess.Popen(
            own_module("deploy.rank", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**supervised_environment(os.environ), "PYTHONPATH": import_path(os.environ)},
        )
        theirs.close()
        self.channel = RankChannel(ours)
        self.said: SimpleQueue[FromRank] = SimpleQueue()
        """Until it serves."""
        self.problem: str | None = None
        """What it said of its failure."""
        self.channel.listen(Topic.CONTROL, self._hear)

    def _hear(self, payload: bytes) -> None:
        said = decode_from_rank(payload)
        if isinstance(said, Failed):
            self.problem = said.error
        self.said.put(said)

    def say(self, message: ToRank) -> None:
        """Nothing if it is gone, which is noticed elsewhere."""
        with suppress(ChannelClosed):
            self.channel.send(Topic.CONTROL, encode(message))

    def ending(self) -> str:
        """How it ended, once its channel is closed."""
        try:
            return describe_exit(self._process.wait(BLAME_S))
        except subprocess.TimeoutExpired:
            return "closed its channel"

    def end(self, wait_s: float) -> None:
        """Wait for its end, and kill it if that takes too long."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            if wait_s:
                log.error("rank %d did not end in %g s, killing it", self.rank, wait_s)
            self._process.kill()
            self._process.wait()


class RankProcesses:
    """All of them; none where the model is not shared. Methods are for the engine thread."""

    def __init__(self, config: NodeConfig, model: Path, identity: NodeIdentity) -> None:
        """Start them; they begin to load at once."""
        self.group: Group = ALONE if config.tp == 1 else RankGroup(0, config.tp)
        """To be connected before a pass."""
        self._timeout_s = config.rank_timeout_s
        self._lock = threading.Lock()
        self._serving = False
        self._ending = threading.Event()
        self._processes: list[RankProcess] = []
        for rank in range(1, config.tp):
            process = RankProcess(rank)
            self._processes.append(process)
            process.channel.start(partial(self._lost, process))
            process.say(
                Setup(
                    config=config,
                    model=str(model),
                    name=identity.name,
                    incarnation=identity.incarnation,
                    rank=rank,
                )
            )

    @property
    def channels(self) -> Sequence[RankChannel]:
        """To rank 1 and those behind it."""
        return [process.channel for process in self._processes]

    # ------------------------------------------------------------ starting

    def connect(self, model: LoadedModel) -> None:
        """Wait until every rank has its part of the model, as rank 0 has `model`, and bring them
        together.

        Raises StartupError.
        """
        for process in self._processes:
            self._await(process, Loaded)
        if isinstance(self.group, RankGroup):
            listening, port = meeting_point()
            self._say(Connect(port))
            with self.blaming():
                self.group.connect(model.device, port, self._timeout_s, listening)

    def memories(self) -> list[PeerMemory]:
        """Wait until every rank has pool and transfer; what each registered, from rank 1 on.

        Raises StartupError.
        """
        return [self._await(process, Ready).memory for process in self._processes]

    def begin_warm_up(self) -> None:
        """They make the passes of a warm-up; rank 0 has to make its own now."""
        self._say(WarmUp())

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """What fails in here, other than for a reason of its own, fails because of a rank.

        Raises StartupError with its word, if it has one, in place of what was raised.
        """
        try:
            yield
        except (StartupError, ModelError):
            raise
        except Exception as error:
            for process in self._processes:
                with suppress(Empty):
                    said = process.said.get(timeout=BLAME_S)
                    if isinstance(said, Failed):
                        raise StartupError(f"rank {process.rank}: {said.error}") from error
            raise

    def serve(self) -> None:
        """From now on the loss of a rank ends this process.

        Raises StartupError if it was lost before.
        """
        with self._lock:
            self._serving = True
        for process in self._processes:
            with suppress(Empty):
                said = process.said.get_nowait()
                assert isinstance(said, Failed), f"rank {process.rank} said {said}"
                raise StartupError(f"rank {process.rank}: {said.error}")

    def _await(self, process: RankProcess, kind: type[Said]) -> Said:
        said = process.said.get()
        if isinstance(said, Failed):
            raise StartupError(f"rank {process.rank}: {said.error}")
        assert isinstance(said, kind), f"rank {process.rank} said {said}"
        return said

    # ------------------------------------------------------------ serving

    def tell_batch(self, payload: bytes) -> None:
        """Hand a batch to all of them. Raises ChannelClosed."""
        for process in self._processes:
            process.channel.send(Topic.BATCH, payload)

    def give_up(self, error: Exception) -> NoReturn:
        """A step failed on rank 0, and the ranks cannot be brought together again."""
        log.critical("a step failed: this node ends", exc_info=error)
        os._exit(LOST_EXIT_CODE)

    def _lost(self, process: RankProcess) -> None:
        """On its channel's thread."""
        if self._ending.is_set():
            return
        ending = process.problem or process.ending()
        with self._lock:
            serving = self._serving
            if not serving:
                process.said.put(Failed(ending))
        if not serving and self._ending.wait(NOTICE_S):
            return
        log.critical("rank %d %s: this node ends", process.rank, ending)
        os._exit(LOST_EXIT_CODE)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """End them in bounded time, those that are still starting at once."""
        self._ending.set()
        self._say(End())
        for process in self._processes:
            process.end(END_S if self._serving else 0.0)
        if isinstance(self.group, RankGroup):
            self.group.close()

    def _say(self, message: ToRank) -> None:
        for process in self._processes:
            process.say(message)
