"""The weights of the adapters that batches compute with, all slots side by side.

For each layer and target there are two matrices: `shrink` [capacity, in_features] and `expand`
[capacity, out_features], a row per rank. A slot owns a range of rows (`ranges`), the same in every
matrix, with the adapter's scaling already in `expand`. Rows that an adapter has no values for are
zero.

    capacity = slots * largest rank

would be much memory if it were used; it is mapped without being touched, so that the system gives
pages for rows that were written. A GPU gives all of it at once. The pool is made at the first
placement, or by `make`: without adapters it costs nothing.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor

from common.engine.cpu import is_native
from common.engine.errors import AdapterError
from common.engine.lora.adapter import Factors, LoraAdapter
from common.engine.lora.ranges import RankRange, RankRanges
from common.engine.lora.targets import Target, targets_of
from common.engine.spec import ModelSpec

MAP_NORESERVE = 0x4000
"""Linux's; Python has a name for it from 3.12 on."""
COPIED_AT_A_TIME = 1 << 14
"""Elements; torch would share out more among threads that belong to the engine."""


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """One target of one layer, all slots."""

    target: Target
    bit: int
    """What says in `PlacedAdapter.present` that an adapter changes this."""
    shrink: Tensor
    """[capacity, in_features]"""
    expand: Tensor
    """[capacity, out_features], scaled."""


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """What a slot holds."""

    range: RankRange
    present: int
    """The `bit` of every target in every layer that the adapter changes."""


class LoraPool:
    """Slots for one model. `place` is for the loader thread, the rest for the engine thread: a slot
    that is being placed is in no batch until it is done, and what a batch reads beyond its own
    slots is finite and does not count."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        slots: int,
        max_rank: int,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.dtype = pool_dtype(dtype, self.device)
        self._targets = targets_of(spec)
        self.layers: tuple[tuple[tuple[TargetWeights, ...], ...], ...] = ()
        """By layer and `Product`; empty before the first placement."""
        self.memory: Tensor | None = None
        """What all of their matrices are views of, flat."""
        self.num_slots = slots
        self.max_rank = max_rank
        self._num_layers = spec.num_layers
        self._ranges = RankRanges(slots, max_rank)
        self._slots: dict[int, PlacedAdapter] = {}
        self._stream: torch.cuda.Stream | None = None
        self._written = 0

    def slot(self, number: int) -> PlacedAdapter:
        """What a batch may use; KeyError for a slot that was never filled."""
        return self._slots[number]

    def place(self, slot: int, adapter: LoraAdapter, rest: Callable[[], None]) -> None:
        """Put an adapter into a slot that no batch uses. `rest` is called between small copies;
        what it raises leaves the slot empty.

        Raises AdapterError: the pool could not be made, or cannot hold the adapter's values.
        """
        self._slots.pop(slot, None)
        self.make()
        with self._copying():
            placed = self._place(slot, adapter, rest)
        self._slots[slot] = placed

    def make(self) -> None:
        """Have the memory, if there is none yet; `num_bytes` of it on a GPU, none so far on a CPU.

        Raises AdapterError: it cannot be had.
        """
        if not self.layers:
            self.layers = self._make()

    @property
    def num_bytes(self) -> int:
        """Of all matrices, made or not."""
        return self._num_elements * self.dtype.itemsize

    @property
    def _num_elements(self) -> int:
        features = sum(target.in_features + target.out_features for target in self._targets)
        return self._num_layers * features * self._ranges.capacity

    def _place(self, slot: int, adapter: LoraAdapter, rest: Callable[[], None]) -> PlacedAdapter:
        place = self._ranges.take(slot, adapter.rank)
        present = 0
        for number, layer in enumerate(self.layers):
            for weights in chain.from_iterable(layer):
                factors = adapter.layers[number].get(weights.target.module)
                if factors is not None:
                    self._written |= weights.bit
                    present |= weights.bit
                    _write(weights, place, factors, rest)
                elif self._written & weights.bit:
                    _clear(weights, place.first, place.last, rest)
        return PlacedAdapter(place, present)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """On a GPU: beside the engine's kernels, on a stream of its own, and done at the end.

        Always the same one: torch has 32 of a device and gives them out in turns, so sooner or
        later a new one would be the engine's, which may be capturing a graph.
        """
        if self.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def _make(self) -> tuple[tuple[tuple[TargetWeights, ...], ...], ...]:
        rows = self._ranges.capacity
        flat = _zeros(self._num_elements, self.dtype, self.device)
        self.memory = flat
        matrices = iter(
            torch.split(
                flat,
                [
                    rows * columns
                    for _ in range(self._num_layers)
                    for target in self._targets
                    for columns in (target.in_features, target.out_features)
                ],
            )
        )
        bits = iter(1 << number for number in range(self._num_layers * len(self._targets)))

        def make(target: Target) -> TargetWeights:
            shrink, expand = next(matrices).view(rows, -1), next(matrices).view(rows, -1)
            return TargetWeights(target, next(bits), shrink, expand)

        return tuple(
            tuple(
                tuple(make(target) for target in targets)
                for _, targets in groupby(self._targets, key=lambda target: target.product)
            )
            for _ in range(self._num_layers)
        )


def pool_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """float32 wherever the model's own products are float32 inside, else the model's dtype."""
    return torch.float32 if device.type == "cpu" and not is_native(dtype) else dtype


def _write(
    weights: TargetWeights, place: RankRange, factors: Factors, rest: Callable[[], None]
) -> None:
    first, rank = place.first, factors.rank
    for rows in _pieces(rank, weights.shrink.shape[1]):
        shrink = _held(factors.shrink[rows], weights.shrink.dtype)
        weights.shrink[first + rows.start : first + rows.stop] = shrink
        rest()
    for rows in _pieces(rank, weights.expand.shape[1]):
        scaled = factors.expand[:, rows].float().t() * factors.scaling
        expand = _held(scaled, weights.expand.dtype)
        weights.expand[first + rows.start : first + rows.stop] = expand
        rest()
    _clear(weights, first + rank, place.last, rest)


def _held(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values`, if a pool of `dtype` holds them as finite numbers: batches also read rows that are
    not their own, and nothing times an infinity is not nothing."""
    if dtype is torch.float16 and float(values.abs().max()) > torch.finfo(dtype).max:
        raise AdapterError("incompatible: it holds values that float16 cannot, and this node's "
                           "weights are float16")  # fmt: skip
    return values


def _clear(weights: TargetWeights, first: int, last: int, rest: Callable[[], None]) -> None:
    for matrix in (weights.shrink, weights.expand):
        for rows in _pieces(last - first, matrix.shape[1]):
            matrix[first + rows.start : first + rows.stop] = 0.0
            rest()


def _pieces(rank: int, features: int) -> list[slice]:
    step = max(1, COPIED_AT_A_TIME // features)
    return [slice(start, min(start + step, rank)) for start in range(0, rank, step)]


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        try:
            memory = torch.zeros(count, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise AdapterError(_no_room("device memory", count * dtype.itemsize, error)) from error
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams are about to write it
        return memory
    # torch.zeros touches every page, and huge pages would make a row of a few kilobytes cost two
    # megabytes.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        mapped = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    except OSError as error:
        raise AdapterError(_no_room("address space", count * dtype.itemsize, error)) from error
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapped, dtype=dtype)


def _no_room(what: str, num_bytes: int, error: Exception) -> str:
    return (
        f"no {what} for the slots, {num_bytes >> 20} MiB: {error}; "
        "fewer max_loras_per_batch or a smaller max_lora_rank need less"
    )
