"""Two ranks of a model, each with a runner that does not wait: the one that draws shares tokens, so
that steps go on from them on both."""

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import pytest
import torch

from common.engine.cuda.runner import CudaModelRunner
from common.engine.loader import load_model
from common.engine.parallel.following import FollowingRunner
from common.engine.parallel.leading import LeadingRunner
from tests.late_stream import LateStream
from tests.unit.engine.conftest import Zoo
from tests.unit.engine.cuda.doubles import DrawingOps
from tests.unit.engine.cuda.driving import LateEngine
from tests.unit.engine.driving import greedy
from tests.unit.engine.parallel.rig import Meeting, MetGroup

Prompt = Callable[..., list[int]]


def give_up(error: Exception) -> NoReturn:
    raise error


class Pair:
    """Rank 0's engine, which tells the other's thread of each batch."""

    def __init__(self, folder: Path) -> None:
        meeting = Meeting(2)
        engines = []
        for rank in (0, 1):
            loaded = load_model(folder, "float32", ops=DrawingOps(), group=MetGroup(meeting, rank))
            stream = LateStream(records=False)  # the ranks' meeting is no operation of torch
            engines.append(LateEngine(loaded, sizes=(4,), draws=rank == 0, stream=stream))
        self.leading, self.following = engines
        self.failed: list[Exception] = []
        self._meeting = meeting
        self._inbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        self.leading.late.warm_up()
        led = LeadingRunner(self.leading.late, self._inbox.put, give_up)
        self.leading.late = led  # type: ignore[assignment]

    def _follow(self) -> None:
        following = FollowingRunner(self.following.late)
        try:
            self.following.late.warm_up()
            while (payload := self._inbox.get()) is not None:
                following.run(payload)
            following.land()
        except Exception as error:
            self.failed.append(error)
            self._meeting.barrier.abort()

    def end(self) -> None:
        self._inbox.put(None)
        self.leading.settle()
        self._thread.join(30.0)
        assert self.failed == []


def run_ahead(zoo: Zoo, prompt: Prompt) -> None:
    pair = Pair(zoo.folder("llama"))
    engine = pair.leading
    generations = [engine.start(slot, prompt(6 + slot, slot), greedy(9)) for slot in range(3)]
    engine.ahead(*((generation, len(generation.prompt)) for generation in generations))
    for _ in range(4):
        engine.ahead(*((generation, 1) for generation in generations))
    late = engine.start(3, prompt(9, 9), greedy(9))
    engine.ahead((late, 9), *((generation, 1) for generation in generations))
    engine.ahead((late, 1), *((generation, 1) for generation in generations))
    pair.end()
    for generation in (*generations, late):
        count = len(generation.outputs)
        assert count > 1
        assert generation.outputs == zoo.greedy("llama", generation.prompt, count)


def test_ranks_run_ahead_together(zoo: Zoo, prompt: Prompt) -> None:
    run_ahead(zoo, prompt)


def test_a_rank_that_is_not_given_the_tokens_is_noticed(
    zoo: Zoo, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = CudaModelRunner.launch

    def planted(self: CudaModelRunner, batch: object) -> object:
        step = original(self, batch)  # type: ignore[arg-type]
        if self._core._sampler is None:
            with torch.inference_mode():
                self._stream.submit(self._drawn.zero_)  # type: ignore[arg-type]
        return step

    monkeypatch.setattr(CudaModelRunner, "launch", planted)
    with pytest.raises(AssertionError):
        run_ahead(zoo, prompt)
