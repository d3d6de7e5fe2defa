"""NIXL from one process's pool to another's on the same card, beside a copy inside its memory."""

import random
from collections.abc import Mapping

from benchmarks.gpu_cells.counts import copy_bytes
from benchmarks.gpu_cells.figures import Figure
from benchmarks.gpu_cells.scale import Cells, Scale, Setting
from benchmarks.gpu_cells.stopwatch import timed_values
from benchmarks.gpu_cells.two_pools import PoolShape, TwoPools, digest


def cells(_scale: Scale) -> Cells:
    return {"transfer": _transfer}


def _transfer(setting: Setting, allowance_s: float) -> Mapping[str, Figure]:
    """One row for each size of write; all between the same two processes."""
    spec, scale = setting.scale.big, setting.scale
    num_pages = max(scale.writes) + 8
    shape = PoolShape(
        num_pages=num_pages,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        page_size=scale.page_size,
        head_dim=spec.head_dim,
        dtype=setting.dtype,
        device=str(setting.device),
    )
    figures: dict[str, Figure] = {}
    with TwoPools(shape) as pools:
        for count in scale.writes:
            chance = random.Random(count)
            source, target = (chance.sample(range(num_pages), count) for _ in range(2))
            each_s = allowance_s / len(scale.writes)
            times = timed_values(lambda: pools.write(source, target), each_s, scale.repetitions)  # noqa: B023
            if pools.landed(target) != digest(pools.cache, source):
                raise RuntimeError(f"{count} pages: other bytes arrived than were sent")
            size = count * pools.cache.page_bytes
            name = f"transfer, {count} page{'s' if count > 1 else ''}"
            figures[name] = _figure(setting, size, times)
    return figures


def _figure(setting: Setting, size: int, times: list[float]) -> Figure:
    kind = "VRAM to VRAM" if setting.device.type == "cuda" else "host memory"
    return Figure(
        unit="GB/s",
        values=[copy_bytes(size) / seconds / 1e9 for seconds in times],
        bound=setting.rates.copy / 1e9 if setting.rates else None,
        bound_name="copy",
        note=f"{size / 1e6:.3g} MB, {kind}, from submission until the receiver's engine is told; "
        "bytes read plus written",
    )
