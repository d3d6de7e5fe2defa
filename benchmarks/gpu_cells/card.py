"""What this card does at best, through torch: the bounds of everything else."""

from collections.abc import Mapping

import torch

from benchmarks.gpu_cells.counts import copy_bytes, product_flops
from benchmarks.gpu_cells.figures import Figure
from benchmarks.gpu_cells.scale import Cells, Scale, Setting
from benchmarks.gpu_cells.stopwatch import Work

COPY = "copy bandwidth"
MATRIX = "matrix rate"


def cells(_scale: Scale) -> Cells:
    return {COPY: _copy, MATRIX: _matrix}


def _copy(setting: Setting, allowance_s: float) -> Mapping[str, Figure]:
    size = setting.scale.copy_mib << 20
    source = torch.empty(size, dtype=torch.uint8, device=setting.device).random_()
    target = torch.empty_like(source)
    work = Work(num_bytes=copy_bytes(size))
    times = setting.stopwatch.on_device(
        lambda: target.copy_(source), work, allowance_s, setting.scale.repetitions
    )
    values = [work.num_bytes / seconds / 1e9 for seconds in times]
    note = f"torch, {size >> 20} MiB inside the card's memory, bytes read plus written"
    return {COPY: Figure(unit="GB/s", values=values, note=note)}


def _matrix(setting: Setting, allowance_s: float) -> Mapping[str, Figure]:
    side = setting.scale.matrix
    # Random numbers: a product of zeros draws less power and runs faster.
    left = torch.randn(side, side, device=setting.device, dtype=setting.dtype)
    right = torch.randn(side, side, device=setting.device, dtype=setting.dtype)
    out = torch.empty_like(left)
    work = Work(flops=product_flops(side, side, side))
    times = setting.stopwatch.on_device(
        lambda: torch.mm(left, right, out=out), work, allowance_s, setting.scale.repetitions
    )
    values = [work.flops / seconds / 1e12 for seconds in times]
    dtype = str(setting.dtype).removeprefix("torch.")
    note = f"torch.mm, {side} x {side} x {side}, {dtype}, random numbers"
    return {MATRIX: Figure(unit="TFLOP/s", values=values, note=note)}
