"""Decode steps of a whole model, as a node runs them, beside the time that their bytes take.

The KV is random: a runner that is handed a slot in the middle of its sequence reads what the pages
hold, as decode does when pages came from elsewhere.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.engine import random_model
from benchmarks.gpu_cells.counts import (
    decode_step_bytes,
    decode_step_flops,
    kv_bytes_per_token,
    layer_weights,
    model_weights,
)
from benchmarks.gpu_cells.engines import make_runner
from benchmarks.gpu_cells.figures import Figure, Target
from benchmarks.gpu_cells.scale import Cells, Measure, Scale, Setting, with_layers
from benchmarks.gpu_cells.stopwatch import Work
from common.engine.ops import choose_ops
from common.engine.spec import ModelSpec
from common.kv_cache.storage import PagedKVCache
from common.messages import SamplingParams
from common.plan import Batch, Row, SlotInit
from common.steps import Pending, Runner

STEP_TARGET = Target("at most", 1.25)
WARM_STEPS = 4
"""Steps before anything is timed: kernels are compiled, and what is lazy is made."""
STEPS_A_VALUE = 8
"""Steps between two looks at the clock."""
MEMORY_SHARE = 0.85
"""Of the card's free memory that weights and pool may take together."""


def cells(scale: Scale) -> Cells:
    return {step_name(*pair): _cell(*pair) for pair in scale.steps}


def step_name(batch: int, context: int) -> str:
    return f"decode step, batch {batch}, context {context}"


def _cell(batch: int, context: int) -> Measure:
    return lambda setting, allowance_s: _measure(setting, batch, context, allowance_s)


def _measure(
    setting: Setting, batch: int, context: int, allowance_s: float
) -> Mapping[str, Figure]:
    until = time.monotonic() + allowance_s
    spec = fitting(setting, batch, context)
    stepper = Stepper(setting, spec, batch, context)
    for _ in range(WARM_STEPS):
        stepper.step()
    stepper.launch_s.clear()
    work = Work(
        STEPS_A_VALUE * decode_step_bytes(spec, [context] * batch, setting.dtype.itemsize),
        STEPS_A_VALUE * decode_step_flops(spec, [context] * batch),
    )
    watch, wanted = setting.stopwatch, setting.scale.repetitions
    half_s = (until - time.monotonic()) / 2
    ahead = watch.on_host(stepper.steps, work, half_s, wanted)
    launching = list(stepper.launch_s)
    stepper.drain()
    alone = watch.on_host(stepper.lone_steps, work, until - time.monotonic(), wanted)
    times = StepTimes(ahead, alone, launching)
    return _figures(setting, spec, (batch, context), work, times)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds: of `STEPS_A_VALUE` steps launched ahead, of as many alone, and of each launch."""

    ahead: list[float]
    alone: list[float]
    launching: list[float]


def _figures(
    setting: Setting, spec: ModelSpec, pair: tuple[int, int], work: Work, times: StepTimes
) -> Mapping[str, Figure]:
    """`pair` are batch and context, `work` is that of `STEPS_A_VALUE` steps."""
    name = step_name(*pair)
    size = work.num_bytes / STEPS_A_VALUE
    dtype = str(setting.dtype).removeprefix("torch.")
    layers = f"{spec.num_layers} of {setting.scale.big.num_layers} layers"
    bound = size / setting.rates.copy * 1e3 if setting.rates else None
    return {
        name: Figure(
            unit="ms",
            values=[seconds / STEPS_A_VALUE * 1e3 for seconds in times.ahead],
            bound=bound,
            bound_name="bytes/copy",
            target=STEP_TARGET if pair[0] == setting.scale.step_target_batch else None,
            note=f"{layers}, {dtype}, {size / 1e9:.3g} GB of weights and KV a step; step n+1 is "
            "launched before step n is taken in",
        ),
        f"{name}: alone": Figure(
            unit="ms",
            values=[seconds / STEPS_A_VALUE * 1e3 for seconds in times.alone],
            bound=bound,
            bound_name="bytes/copy",
            note="each step is taken in before the next is launched",
        ),
        f"{name}: host work to launch": Figure(
            unit="ms", values=[seconds * 1e3 for seconds in times.launching]
        ),
    }


class Stepper:
    """Decodes one token for each of `batch` sequences, again and again at position `context` - 1,
    so that all steps are equal."""

    def __init__(self, setting: Setting, spec: ModelSpec, batch: int, context: int) -> None:
        page_size = setting.scale.page_size
        each = -(-context // page_size)
        loaded = random_model(spec, setting.dtype, setting.device, choose_ops("triton"))
        cache = PagedKVCache(
            num_pages=batch * each,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            page_size=page_size,
            head_dim=spec.head_dim,
            dtype=setting.dtype,
            device=setting.device,
            scratch=True,
        )
        self._runner: Runner = make_runner(loaded, cache, batch, context, (batch,))
        cache.tensor.normal_(0.0, 0.5)
        self._context = context
        self._pages = torch.randperm(batch * each).view(batch, each).tolist()
        self._pending: Pending | None = None
        self._number = 0
        self.launch_s: list[float] = []
        """What each `launch` took so far."""

    def steps(self) -> None:
        """`STEPS_A_VALUE` steps, each launched before the one before is taken in."""
        for _ in range(STEPS_A_VALUE):
            self.step()

    def lone_steps(self) -> None:
        """As many, one after the other."""
        for _ in range(STEPS_A_VALUE):
            self.step()
            self.drain()

    def step(self) -> None:
        """Launch a step, and take in the one before; this one too where the runner wants that."""
        batch = self._batch()
        began = time.perf_counter()
        launched = self._runner.launch(batch)
        self.launch_s.append(time.perf_counter() - began)
        self.drain()
        self._pending = launched
        if not self._runner.overlaps:
            self.drain()

    def drain(self) -> None:
        """Take in what is in flight."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _batch(self) -> Batch:
        number, self._number = self._number, self._number + 1
        start = self._context - 1
        if number == 0:
            sampling = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)
            init = SlotInit(sampling, [5] * start, [5])
            return Batch(
                tuple(Row(s, start, (5,), pages, 1, init) for s, pages in enumerate(self._pages))
            )
        # A token that is in flight is known to the runner alone.
        ahead = self._pending is not None
        return Batch(
            tuple(
                Row(slot, start, (5,), (), number + 1, from_slot=ahead)
                for slot in range(len(self._pages))
            )
        )


def fitting(setting: Setting, batch: int, context: int) -> ModelSpec:
    """The large model with as many layers as fit into the card beside its pool."""
    spec, itemsize = setting.scale.big, setting.dtype.itemsize
    if setting.device.type != "cuda":
        return spec
    free = int(torch.cuda.mem_get_info(setting.device)[0] * MEMORY_SHARE)
    page_size = setting.scale.page_size
    tokens = batch * (-(-context // page_size)) * page_size
    fixed = (model_weights(spec) - spec.num_layers * layer_weights(spec)) * itemsize
    a_layer = layer_weights(spec) * itemsize
    a_layer += tokens * kv_bytes_per_token(spec, itemsize) // spec.num_layers
    layers = min(spec.num_layers, (free - fixed) // a_layer)
    if layers < 1:
        raise MemoryError("not one layer of the model fits into the card's memory")
    return with_layers(spec, layers)
