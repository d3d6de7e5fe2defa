"""A process that measures some cells, one after the other, and writes down each outcome at once.

    python -m benchmarks.gpu_cells.worker ORDER_FILE

Of its own since a kernel that goes wrong takes the process's whole CUDA context with it: a worker
that finds its card unusable ends, and what is left goes to the next one (`supervise`).
"""

import gc
import importlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from benchmarks.gpu_cells.budget import cell_allowance
from benchmarks.gpu_cells.figures import Begun, Failed, Line, Measured, read_lines
from benchmarks.gpu_cells.scale import DRY, DRY_RATES, FULL, Cells, Measure, Scale, Setting
from benchmarks.gpu_cells.stopwatch import CudaStopwatch, ModelledStopwatch, Rates

SHOWN_LINES = 20
"""Of a traceback, with what was noted beside it: the end of a cluster's log, for one."""
UNUSABLE = 3
"""Exit code of a worker whose card answers no more."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told."""

    group: str
    """A module's name."""
    cells: list[str]
    seconds: float
    dry: bool
    copy_rate: float | None
    matrix_rate: float | None
    scratch: str
    model: str
    outcomes: str
    """File that a line of JSON is appended to for each outcome."""


@dataclass(frozen=True, slots=True)
class Attempted:
    """How a worker fared."""

    lines: list[Line]
    code: int | None
    """Its exit code; None where it was stopped for taking too long."""
    said: str
    """The last that it wrote beside its outcomes."""


def cells_of(group: str, scale: Scale) -> Cells:
    """What a group (a module with a function `cells`) measures; touches no device.

    Each is imported for itself, so that a package which one of them needs and this machine lacks
    costs the others nothing.
    """
    cells: Cells = importlib.import_module(group).cells(scale)
    return cells


def setting_of(order: Order) -> Setting:
    measured = order.copy_rate is not None and order.matrix_rate is not None
    rates = Rates(order.copy_rate or 0.0, order.matrix_rate or 0.0) if measured else None
    if order.dry:
        device, dtype = torch.device("cpu"), torch.float32
    else:
        device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    return Setting(
        scale=DRY if order.dry else FULL,
        device=device,
        dtype=dtype,
        stopwatch=ModelledStopwatch(DRY_RATES) if order.dry else CudaStopwatch(),
        rates=rates,
        scratch=order.scratch,
        model=order.model,
    )


def carry_out(order: Order, clock: Callable[[], float] = time.monotonic) -> bool:
    """Measure everything in the order; False where the card became unusable before the end."""
    until = clock() + order.seconds
    setting = setting_of(order)
    known = cells_of(order.group, setting.scale)
    with Path(order.outcomes).open("ab", buffering=0) as sink:
        for number, name in enumerate(order.cells):
            sink.write(encode(Begun(name)))
            allowance_s = cell_allowance(until - clock(), len(order.cells) - number)
            for line in measure(name, known[name], setting, allowance_s):
                sink.write(encode(line))
            if not usable(setting.device):
                return False
    return True


def attempt_here(order: Order, _timeout_s: float) -> Attempted:
    """`supervise.Attempt` without a process of its own: nothing can be stopped."""
    with tempfile.TemporaryDirectory(prefix="pdserve-gpu-") as folder:
        outcomes = Path(folder) / "outcomes"
        answers = carry_out(msgspec.structs.replace(order, outcomes=str(outcomes)))
        return Attempted(read_lines(outcomes.read_bytes()), 0 if answers else UNUSABLE, "")


def measure(name: str, how: Measure, setting: Setting, allowance_s: float) -> list[Line]:
    """One cell's figures, or how it failed."""
    try:
        figures = how(setting, allowance_s)
    except Exception as error:
        last = traceback.format_exc().splitlines()[-SHOWN_LINES:]
        return [Failed(name, describe(error), "\n".join(last))]
    finally:
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    return [Measured(row, figure) for row, figure in figures.items()]


def usable(device: torch.device) -> bool:
    """Whether the card still answers: after a bad memory access nothing in this process does."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def describe(error: BaseException) -> str:
    """One line of at most 200 characters."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


def encode(line: Line) -> bytes:
    """As `read_lines` takes it."""
    return msgspec.json.encode(line) + b"\n"


def main() -> int:
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order)
    return 0 if carry_out(order) else UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
