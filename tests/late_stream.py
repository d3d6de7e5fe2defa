"""The CPU twin of a GPU's stream: it computes as late as it may, and replays what it recorded.

* What is submitted is run when an event behind it is waited for, and not before: a host that writes
  into what an earlier step has yet to copy changes that step, as it might on a GPU.
* A graph is the list of torch operations of its capture, with the very tensors and numbers they
  were called with. Replaying calls them anew: what a capture took from the host stays as it was.
* Work runs in the inference mode of whoever submits or captures it, as it would on a GPU, where it
  runs at once: tensors that were made in that mode take no writes outside of it.
* Work that looks at a tensor's values, which on a GPU waits for it, is an error.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = (
    Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.cpu, Tensor.nonzero, Tensor.__bool__,
    Tensor.__int__, Tensor.__float__, Tensor.__index__, torch.nonzero, torch.masked_select,
)  # fmt: skip
"""What needs a tensor's values on the host."""


class HostWaited(AssertionError):
    """Submitted work has looked at a tensor's values."""


class _NoWaiting(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in WAITING:
            raise HostWaited(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Call:
    func: Any
    args: Any
    kwargs: dict[str, Any]
    results: Any


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            raise HostWaited("a captured graph cannot take a tensor from the host")
        results = func(*args, **(kwargs or {}))
        self.calls.append(Call(func, args, kwargs or {}, results))
        return results


@dataclass
class Recorded:
    """A captured graph."""

    output: Tensor
    calls: list[Call] = field(default_factory=list)
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        for call in self.calls:
            given = {_memory(tensor) for tensor in _tensors((call.args, call.kwargs))}
            kept = list(_tensors(call.results))
            writes = any(a.alias_info and a.alias_info.is_write for a in call.func._schema.returns)
            if not writes and kept and all(_memory(tensor) in given for tensor in kept):
                continue  # views: of the same tensors as before
            fresh = _tensors(call.func(*call.args, **call.kwargs))
            for old, new in zip(kept, fresh, strict=True):
                if _memory(old) not in given:
                    old.copy_(new)


@dataclass
class Rerun:
    """What stands in for a graph where not all is torch's: the work itself, once more."""

    work: Callable[[], Tensor]
    output: Tensor
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        self.output.copy_(self.work())


@dataclass(eq=False)
class LateEvent:
    stream: "LateStream"
    upto: int

    def wait(self) -> None:
        self.stream.waits += 1
        self.stream.run_upto(self.upto)

    def done(self) -> bool:
        return self.stream.num_run >= self.upto


class LateStream:
    """`Stream` over a CPU. Unless it `records`, graphs run their work anew, and nobody is watched:
    for Triton's interpreter, which is not torch's and looks at everything."""

    def __init__(self, *, records: bool = True) -> None:
        self.waits = 0
        """Events waited for."""
        self.graphs: list[Recorded | Rerun] = []
        self.num_run = 0
        self._records = records
        self._queue: deque[tuple[Callable[[], None], bool]] = deque()
        self._num_submitted = 0

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def submit(self, work: Callable[[], None]) -> LateEvent:
        self._queue.append((work, torch.is_inference_mode_enabled()))
        self._num_submitted += 1
        return LateEvent(self, self._num_submitted)

    def run_upto(self, count: int) -> None:
        while self.num_run < count:
            self.num_run += 1
            work, inference = self._queue.popleft()
            with torch.inference_mode(inference), self._guard():
                work()

    def capture(self, work: Callable[[], Tensor]) -> Recorded | Rerun:
        self.run_upto(self._num_submitted)
        graph: Recorded | Rerun
        with self._guard():
            work()
            if self._records:
                calls: list[Call] = []
                with _Recorder(calls):
                    graph = Recorded(work(), calls)
            else:
                graph = Rerun(work, work())
        self.graphs.append(graph)
        return graph

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _guard(self) -> AbstractContextManager[object]:
        return _NoWaiting() if self._records else nullcontext()
