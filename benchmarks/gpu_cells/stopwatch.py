"""How long work takes: on a card by its own events, in a dry run by a model of it.

A kernel is timed with events on its stream. Before each repetition a buffer larger than the card's
cache is written, so that nothing of the inputs is left in it, and the card is kept busy for long
enough that the launch is queued when the first event fires: what is measured is the kernel, not how
fast Python launches it.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.gpu_cells.budget import repetitions

FLUSH_BYTES = 256 << 20
"""Several times the largest cache of a card yet (an H200 has 60 MB, a B200 126 MB)."""
HEAD_START_CYCLES = 2_000_000
"""Some millisecond, in which Python queues a launch."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one call must move and compute at the least."""

    num_bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """What a card does: bytes a second (read plus written) of a copy, operations a second of a
    matrix product."""

    copy: float
    matrix: float

    def seconds(self, work: Work) -> float:
        """The longer of the two times that `work` takes at these rates."""
        return max(work.num_bytes / self.copy, work.flops / self.matrix)


class Stopwatch(Protocol):
    """Seconds of each of several calls of `run`, after one that does not count.

    `allowance_s` bounds the whole, dropping repetitions of the `wanted` ones.
    """

    def on_device(
        self, run: Callable[[], object], work: Work, allowance_s: float, wanted: int
    ) -> list[float]:
        """`run` only queues work; the time is the card's."""
        ...

    def on_host(
        self, run: Callable[[], object], work: Work, allowance_s: float, wanted: int
    ) -> list[float]:
        """`run` returns when its work is done; the time is a person's."""
        ...


class CudaStopwatch:
    """The real one, for the current CUDA device."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def on_device(
        self, run: Callable[[], object], _work: Work, allowance_s: float, wanted: int
    ) -> list[float]:
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        again = time.perf_counter()
        self._timed(run)
        torch.cuda.synchronize()
        one_s = time.perf_counter() - again
        left_s = allowance_s - (time.perf_counter() - began)
        pairs = [self._timed(run) for _ in range(repetitions(left_s, one_s, wanted))]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]

    def on_host(
        self, run: Callable[[], object], _work: Work, allowance_s: float, wanted: int
    ) -> list[float]:
        return timed_on_host(run, allowance_s, wanted)

    def _timed(self, run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._flush.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        return begin, end


def timed_on_host(run: Callable[[], object], allowance_s: float, wanted: int) -> list[float]:
    """Wall times of `run`, which waits for its own work."""

    def timed() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return timed_values(timed, allowance_s, wanted)


def timed_values(timed: Callable[[], float], allowance_s: float, wanted: int) -> list[float]:
    """What `timed` says of itself, as often as there is time for; the first call does not count."""
    began = time.perf_counter()
    timed()
    once = time.perf_counter()
    values = [timed()]
    now = time.perf_counter()
    more = repetitions(allowance_s - (now - began), now - once, wanted - 1) if wanted > 1 else 0
    return values + [timed() for _ in range(more)]


class ModelledStopwatch:
    """The dry run's: calls `run` once, so that its code is executed, and answers what a card of
    `rates` would need that works at 1/1.2, 1/1.25 and 1/1.3 of them in turn."""

    SLOWNESS = (1.2, 1.25, 1.3)

    def __init__(self, rates: Rates) -> None:
        self._rates = rates

    def on_device(
        self, run: Callable[[], object], work: Work, _allowance_s: float, wanted: int
    ) -> list[float]:
        run()
        return list(itertools.islice(self._times(work), wanted))

    def on_host(
        self, run: Callable[[], object], work: Work, _allowance_s: float, wanted: int
    ) -> list[float]:
        return self.on_device(run, work, 0.0, wanted)

    def _times(self, work: Work) -> Iterator[float]:
        ideal = self._rates.seconds(work)
        return (ideal * factor for factor in itertools.cycle(self.SLOWNESS))
