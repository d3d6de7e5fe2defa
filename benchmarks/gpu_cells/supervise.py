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
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.gpu_cells.figures import Begun, Failed, NotRun, Outcome, read_lines
from benchmarks.gpu_cells.worker import Attempted, Order

POLL_S = 0.05
GRACE_S = 20.0
"""Beyond its time, for a cell that is under way."""
SHOWN_LINES = 12
"""Of what a dead worker last said."""


Attempt = Callable[[Order, float], Attempted]
"""Runs one worker to its end, or for so many seconds."""


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
        tried = attempt(again, left_s + GRACE_S)
        outcomes += (line for line in tried.lines if not isinstance(line, Begun))
        begun = [line.cell for line in tried.lines if isinstance(line, Begun)]
        why = _how_it_ended(tried.code)
        if not begun:
            outcomes += [Failed(cell, why, tried.said) for cell in pending]
            break
        if isinstance(tried.lines[-1], Begun):
            outcomes.append(Failed(begun[-1], why, tried.said))
        pending = [cell for cell in pending if cell not in begun]
    return outcomes


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "stopped: it took longer than its share of the time"
    if code < 0:
        return f"the process was ended by signal {-code}"
    return f"the process ended with exit code {code}"


def attempt_in_process(order: Order, timeout_s: float) -> Attempted:
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
        return Attempted(read_lines(outcomes.read_bytes()), code, said)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """The worker and whatever it started, which is all in the session that it leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
