"""Cells that go wrong in every way that a process can, for the tests of what runs them."""

import os
import signal
import sys
import time
from collections.abc import Mapping

from benchmarks.gpu_cells.figures import Figure
from benchmarks.gpu_cells.scale import Cells, Scale, Setting


def cells(_scale: Scale) -> Cells:
    return {
        "right": _right, "raises": _raises, "exits": _exits, "crashes": _crashes,
        "hangs": _hangs, "right again": _right,
    }  # fmt: skip


def _right(_setting: Setting, allowance_s: float) -> Mapping[str, Figure]:
    return {"right": Figure(unit="s", values=[allowance_s])}


def _raises(_setting: Setting, _allowance_s: float) -> Mapping[str, Figure]:
    raise ValueError("a shape is wrong\nand more")


def _exits(_setting: Setting, _allowance_s: float) -> Mapping[str, Figure]:
    sys.stderr.write("last words\n")
    sys.stderr.flush()
    os._exit(7)


def _crashes(_setting: Setting, _allowance_s: float) -> Mapping[str, Figure]:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def _hangs(_setting: Setting, _allowance_s: float) -> Mapping[str, Figure]:
    time.sleep(600)
    raise AssertionError
