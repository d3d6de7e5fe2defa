"""What the runner asks of a GPU beside torch's operations: a queue of its own, and its graphs.

The seam is narrow so that all above it can be driven on a CPU, by a twin that computes as late as
it may (`tests/late_stream.py`). What is submitted runs in order; the host goes on at once, and
learns of the end of something only by an event behind it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block the host until everything before it is done. Raises what went wrong there."""
        ...

    def done(self) -> bool:
        """Whether that is so already. Never blocks; on any thread."""
        ...


class Graph(Protocol):
    """Work that was captured; what it reads and writes are the same tensors each time."""

    @property
    def output(self) -> Tensor:
        """What the work gave; each replay writes it anew."""
        ...

    def replay(self) -> None:
        """Run it once more, as a part of what is submitted."""
        ...


class Stream(Protocol):
    """One queue of one device, used by one thread."""

    def host_buffer(self, size: int) -> Tensor:
        """[size] int64 in memory that the device can copy from and to without the host."""
        ...

    def submit(self, work: Callable[[], None]) -> Event:
        """Queue what `work` does to tensors, and give the event behind it.

        `work` is called once, now or later, and must not look at values of the device's tensors.
        """
        ...

    def capture(self, work: Callable[[], Tensor]) -> Graph:
        """Run `work` once to warm it up, then capture it. It must not look at any tensor's values,
        and computes only from tensors that live as long as the graph. May block."""
        ...

    def active(self) -> AbstractContextManager[object]:
        """Operations inside are queued behind what was submitted."""
        ...


class CudaEvent:
    """`Event` of the stream that is current when it is made."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """`Graph` of torch's."""

    graph: torch.cuda.CUDAGraph
    output: Tensor

    def replay(self) -> None:
        self.graph.replay()


class CudaStream:
    """`Stream` of a GPU. Its graphs share one pool of memory, so capture the largest first."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))  # weights may be on their way
        self._pool = torch.cuda.graph_pool_handle()

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=True)

    def submit(self, work: Callable[[], None]) -> CudaEvent:
        with self.active():
            work()
            return CudaEvent()

    def capture(self, work: Callable[[], Tensor]) -> CudaGraph:
        with self.active():
            work()  # compiles kernels, and lets libraries allocate what a capture must not
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads go on copying adapters meanwhile: their calls are none of this capture's.
        mode = "thread_local"
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
            output = work()
        return CudaGraph(graph, output)

    def active(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)
