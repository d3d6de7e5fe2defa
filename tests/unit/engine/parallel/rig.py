"""A model shared by ranks that are threads of one process, and meet in the middle of each layer."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from common.engine.loader import LoadedModel, load_model
from common.engine.lora.pool import LoraPool
from common.engine.parallel.following import FollowingRunner
from common.engine.parallel.leading import LeadingRunner
from tests.unit.engine.driving import Engine

MEET_S = 30.0


class Meeting:
    """Where all ranks leave a tensor and take everybody's."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=MEET_S)
        self._left: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, mine: Tensor) -> list[Tensor]:
        self._left[rank] = mine.clone()
        self.barrier.wait()
        everybody = list(self._left)
        self.barrier.wait()
        assert len({(tensor.shape, tensor.dtype) for tensor in everybody}) == 1
        return everybody


class MetGroup:
    """`Group` over a `Meeting`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def sum_(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._meeting.exchange(self.rank, x)).sum(0))

    def join_columns(self, x: Tensor, columns: int) -> Tensor:
        piece = -(-columns // self.size)
        padded = functional.pad(x, (0, piece - x.shape[1]), value=float("nan"))
        return torch.cat(self._meeting.exchange(self.rank, padded), dim=1)[:, :columns]

    def share_(self, x: Tensor) -> None:
        x.copy_(self._meeting.exchange(self.rank, x)[0])

    def least(self, number: int) -> int:
        return int(torch.stack(self._meeting.exchange(self.rank, torch.tensor(number))).min())


class GaveUp(Exception):
    """Where a node would end."""


MakePool = Callable[[LoadedModel, int, int], LoraPool]
"""Of a rank's model, from (model, rank, size)."""


@contextmanager
def shared(folder: Path, size: int, make_pool: MakePool | None = None) -> Iterator[Engine]:
    """Rank 0's engine; the other ranks follow it until the end."""
    meeting = Meeting(size)
    engines = []
    for rank in range(size):
        loaded = load_model(folder, "float32", group=MetGroup(meeting, rank))
        pool = None if make_pool is None else make_pool(loaded, rank, size)
        engines.append(Engine(loaded, lora=pool, draws=rank == 0))
    failed: list[Exception] = []
    inboxes: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in engines[1:]]

    def follow(engine: Engine, inbox: SimpleQueue[bytes | None]) -> None:
        following = FollowingRunner(engine.runner)
        while (payload := inbox.get()) is not None:
            try:
                following.run(payload)
            except Exception as error:
                failed.append(error)
                meeting.barrier.abort()

    def tell(payload: bytes) -> None:
        for inbox in inboxes:
            inbox.put(payload)

    def give_up(error: Exception) -> NoReturn:
        raise GaveUp from error

    threads = [
        threading.Thread(target=follow, args=pair, daemon=True)
        for pair in zip(engines[1:], inboxes, strict=True)
    ]
    for thread in threads:
        thread.start()
    first = engines[0]
    first.runner = LeadingRunner(first.runner, tell, give_up)  # type: ignore[assignment]
    try:
        yield first
    finally:
        for inbox, thread in zip(inboxes, threads, strict=True):
            inbox.put(None)
            thread.join(MEET_S)
    assert not failed
