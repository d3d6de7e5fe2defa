"""How many KV pages fit on a GPU: arithmetic over a few numbers, and the reading of those numbers.

    total   [ not allowed | weights | working | adapters | reserve |          pages          ]
                 1 - mem_fraction        │         │         │
    what a run of the largest batch held ┘         │         └ graphs, kernels, libraries
                 slots, taken with the first of them

A run of the largest batch tells the working memory, as in vLLM; nothing else knows what kernels,
products and the sampler take together. What this process holds is asked of torch's allocator and
not of the device, so that nodes which start on one GPU at the same time do not count each other's
weights as their own. What is free on the device bounds the pages too: others may hold more than
their share.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from common.engine.errors import MemoryPlanError

MIB = 1 << 20
GIB = 1 << 30
RESERVE_BYTES = 512 * MIB
"""For what comes after the pool was sized and no allocator of ours sees: more captured graphs,
kernels loaded late, workspaces of cuBLAS, NCCL and UCX, and fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReadings:
    """What a device and torch's allocator on it said, in bytes."""

    total: int
    """The device's memory."""
    unused_by_others: int
    """What would be free without this node."""
    free: int
    """Now: the weights are there, and the profiling run has given back what it held."""
    weights: int
    """Held by this node now."""
    working: int
    """The most that the profiling run held beside them."""


def plan_pages(
    readings: MemoryReadings,
    mem_fraction: float,
    page_bytes: int,
    *,
    adapters: int = 0,
    device: str = "the device",
    reserve: int = RESERVE_BYTES,
) -> int:
    """How many pages of `page_bytes` this node may have, `adapters` bytes kept for LoRA slots.

    With them it holds at most `mem_fraction` of the device, and takes no more than is free.

    Raises:
        MemoryPlanError: not even one fits; the message has all the numbers.
    """
    allowed = int(readings.total * mem_fraction)
    room = min(allowed - readings.weights, readings.free)
    room -= readings.working + adapters + reserve
    pages = room // page_bytes
    if pages >= 1:
        return pages
    others = readings.total - readings.unused_by_others
    raise MemoryPlanError(
        f"memory: no page pool fits on {device}. Of its {_gib(readings.total)} GiB mem_fraction "
        f"{mem_fraction:g} allows this node {_gib(allowed)}; others hold {_gib(others)}, "
        f"{_gib(readings.free)} are free now. Weights hold {_gib(readings.weights)}, the largest "
        f"batch works with {_gib(readings.working)}, {_gib(adapters)} are kept for LoRA slots and "
        f"{_gib(reserve)} for graphs and libraries: that leaves {_gib(room)} GiB, and a page has "
        f"{page_bytes / MIB:.2f} MiB. A smaller chunk_size, max_running_requests or max_model_len "
        "needs less working memory, max_loras_per_batch or max_lora_rank fewer slots"
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}"


class MemoryGauge(Protocol):
    """Asks a device and this process's allocator on it; all answers in bytes."""

    def total(self) -> int: ...

    def free(self) -> int:
        """Not held by any process; what this one's allocator keeps unused counts as held."""
        ...

    def held(self) -> int:
        """Taken from the device by this process's allocator."""
        ...

    def most_held(self) -> int:
        """The most since `settle`."""
        ...

    def settle(self) -> None:
        """Wait for the device, give back what is unused, begin to watch `most_held` anew."""
        ...


class CudaGauge:
    """`MemoryGauge` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def most_held(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


def gauge_of(device: torch.device) -> MemoryGauge | None:
    """None for host memory, of which nobody has to say how much there is."""
    return CudaGauge(device) if device.type == "cuda" else None


def read_memory(gauge: MemoryGauge, profile: Callable[[], None]) -> MemoryReadings:
    """Run `profile`, which drops all that it made, and read what it took.

    Raises:
        MemoryPlanError: not even the profiling run found room.
    """
    gauge.settle()
    before = gauge.held()
    unused_by_others = gauge.free() + before
    try:
        profile()
    except torch.OutOfMemoryError as error:
        first = str(error).partition("\n")[0]
        raise MemoryPlanError(
            f"memory: the largest batch does not fit beside {_gib(before)} GiB of weights, of "
            f"{_gib(gauge.total())} GiB others leave {_gib(unused_by_others)}: {first}"
        ) from error
    most = gauge.most_held()
    gauge.settle()
    return MemoryReadings(
        total=gauge.total(),
        unused_by_others=unused_by_others,
        free=gauge.free(),
        weights=gauge.held(),
        working=max(0, most - before),
    )
