"""Runs workers, and sees to it that every cell has an outcome whatever becomes of them.

A worker that dies, hangs past its time or finds the card unusable costs the cell that it was at;
the cells behind that go to a fresh worker. A worker that dies before it has begun a cell would do
so again: then the rest of its group has failed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from benchmarks.gpu_cells.figures import Begun, Failed, Line, NotRun, Outcome, read_lines
from benchmarks.gpu_cells.worker import Order

POLL_S = 0.05
GRACE_S = 20.0
"""Beyond its time, for a cell that is under way."""
SHOWN_LINES = 12
"""Of what a dead worker last said."""


class Attempt(Protocol):
    """Runs one worker to its end, or to `timeout_s`; gives its outcomes, its exit code (None: it
    was stopped for taking too long) and the last that it wrote."""

    def __call__(self, order: Order, timeout_s: float) -> tuple[list[Line], int | None, str]: ...


def run_group(
    order: Order,
    deadline: float,
    attempt: Attempt,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Outcomes of every cell of `order`, whose `seconds` are replaced by what is left until
    `deadline`."""
    outcomes: list[Outcome] = []
    pending = list(order.cells)
    while pending:
        left_s = deadline - clock()
        if left_s <= 0:
            outcomes += [NotRun(cell, "the time budget was used up") for cell in pending]
            break
        again = msgspec.structs.replace(order, cells=pending, seconds=left_s)
        lines, code, said = attempt(again, left_s + GRACE_S)
        outcomes += (line for line in lines if not isinstance(line, Begun))
        begun, cut = _progress(lines)
        if cut is not None:
            outcomes.append(Failed(cut, _how_it_ended(code), said))
        elif not begun:
            outcomes += [Failed(cell, _how_it_ended(code), said) for cell in pending]
            break
        pending = [cell for cell in pending if cell not in begun]
    return outcomes


def _progress(lines: Sequence[Line]) -> tuple[set[str], str | None]:
    """The cells that were begun, and that of them which never got an outcome."""
    begun: set[str] = set()
    open_cell: str | None = None
    for line in lines:
        if isinstance(line, Begun):
            begun.add(line.cell)
            open_cell = line.cell
        else:
            open_cell = None
    return begun, open_cell


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "stopped: it took longer than its share of the time"
    if code < 0:
        return f"the process was ended by signal {-code}"
    return f"the process ended with exit code {code}"


def attempt_in_process(order: Order, timeout_s: float) -> tuple[list[Line], int | None, str]:
    """`Attempt` with a process of its own."""
    with tempfile.TemporaryDirectory(prefix="pdserve-gpu-") as folder:
        outcomes, log = Path(folder) / "outcomes", Path(folder) / "log"
        outcomes.touch()
        order = msgspec.structs.replace(order, outcomes=str(outcomes))
        task = Path(folder) / "order"
        task.write_bytes(msgspec.json.encode(order))
        command = [sys.executable, "-m", "benchmarks.gpu_cells.worker", str(task)]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end_session(process)
        said = "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])
        return read_lines(outcomes.read_bytes()), code, said


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """The worker and whatever it started, which is all in the session that it leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
