"""What a busy transfer thread costs the forward pass beside it.

    python -m benchmarks.step_beside_transfer [--tcp]

A step is 600 matmuls on one thread with Python and its GIL between them: `tiny` ones of about a
microsecond, the worst case for a GIL that is taken away, and `layer` ones of SmolLM2's size. Steps
are timed alone and beside the transfer thread, in turns, in one process; the receiver is another.
Loads:

    polling     64 writes posted to a stopped process: nothing moves, the thread only looks
    chunks      each step begins with a write of 32 pages (512 tokens) posted
    one page    ... with eight writes of one page: many events
    saturated   ... with two writes of 128 pages, more than any prefill here computes: on few cores
                the copying takes its share of the processors and of the memory's bandwidth

Printed: the median of the rounds' ratios. The rule is at most 1.3.
"""

import argparse
import os
import signal
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.transfer_target import NUM_PAGES, PAGE_BYTES, TARGET, Target, backend, filled_pool
from common.plan import Write, WriteDone
from transfer.base import TransferBackend

ROUNDS = 15
MATMULS = 600


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    posted: int
    pages: int
    stopped: bool = False


LOADS = (
    Load("polling", 64, 1, stopped=True),
    Load("chunks", 1, 32),
    Load("one page", 8, 1),
    Load("saturated", 2, 128),
)


class Step:
    """600 products of [rows, width] with [width, columns], `repeats` times in a row."""

    def __init__(self, name: str, rows: int, width: int, columns: int, repeats: int) -> None:
        self.name = name
        self._repeats = repeats
        self._x = torch.randn(rows, width)
        self._weights = [torch.randn(width, columns) for _ in range(30)]

    def seconds(self) -> float:
        """The mean time of a step."""
        start = time.perf_counter()
        for _ in range(self._repeats):
            for index in range(MATMULS):
                torch.mm(self._x, self._weights[index % 30])
        return (time.perf_counter() - start) / self._repeats


class Feeder:
    """Keeps a load posted; the engine thread does it between steps, as in a node."""

    def __init__(self, source: TransferBackend) -> None:
        self._source = source
        self.submitted = 0
        self.posted = 0
        self.pages_done = 0

    def top_up(self, load: Load) -> None:
        for event in self._source.poll():
            if not isinstance(event, WriteDone):
                raise RuntimeError(f"unexpected: {event}")
            self.posted -= 1
            self.pages_done += event.num_bytes // PAGE_BYTES
        pages = tuple(range(load.pages))
        missing = load.posted - self.posted
        rooms = range(self.submitted, self.submitted + missing)
        self._source.submit([Write(room, 0, TARGET, pages, pages, b"") for room in rooms])
        self.submitted += missing
        self.posted += missing

    def drain(self) -> None:
        deadline = time.monotonic() + 30
        while self.posted and time.monotonic() < deadline:
            self.posted -= len(self._source.poll())
            time.sleep(0.001)


def compare(step: Step, feeder: Feeder, target: Target, load: Load) -> None:
    pid = target.process.pid
    if pid is None:
        raise RuntimeError("the target is not running")
    alone, beside, ratios = [], [], []
    busy_s = 0.0
    feeder.pages_done = 0
    for _ in range(ROUNDS):
        feeder.drain()
        time.sleep(0.01)
        alone.append(statistics.median(step.seconds() for _ in range(5)))
        if load.stopped:
            os.kill(pid, signal.SIGSTOP)
        times = []
        start = time.monotonic()
        for _ in range(5):
            feeder.top_up(load)
            times.append(step.seconds())
        busy_s += time.monotonic() - start
        if load.stopped:
            os.kill(pid, signal.SIGCONT)
        beside.append(statistics.median(times))
        ratios.append(beside[-1] / alone[-1])
    rate = feeder.pages_done * PAGE_BYTES / busy_s / 1e9
    print(
        f"{step.name:>6} {load.name:>10} {statistics.median(alone) * 1e3:>9.2f} "
        f"{statistics.median(beside) * 1e3:>10.2f} {statistics.median(ratios):>6.2f} {rate:>6.2f}"
    )
    feeder.drain()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tcp", action="store_true", help="the network path (UCX_TLS=tcp)")
    if parser.parse_args().tcp:
        os.environ["UCX_TLS"] = "tcp"
    torch.set_num_threads(1)
    pool = filled_pool()
    source = backend(pool, "bench-source")
    source.start(lambda: None)
    target = Target(source)
    feeder = Feeder(source)
    steps = (Step("tiny", 2, 16, 16, repeats=20), Step("layer", 8, 576, 192, repeats=1))
    feeder.top_up(Load("warm up", 1, NUM_PAGES))
    feeder.drain()
    print(f"{'step':>6} {'load':>10} {'alone ms':>9} {'beside ms':>10} {'ratio':>6} {'GB/s':>6}")
    for step in steps:
        for load in LOADS:
            compare(step, feeder, target, load)
    target.close()
    source.close()


if __name__ == "__main__":
    main()
