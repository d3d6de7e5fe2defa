"""Attention kernels alone."""

from benchmarks.gpu_cells.scale import Cells, Scale


def cells(scale: Scale) -> Cells:
    return {}
