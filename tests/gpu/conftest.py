"""Tests that need a CUDA device; `python -m benchmarks.gpu` runs them and more.

    TRITON_INTERPRET=0 python -m pytest tests/gpu

Kernels are compiled here, while tests/kernels interprets them, and a process of Triton's does one
or the other: in a run over all tests these are skipped also where a device is.
PDSERVE_GPU_DRY_RUN=1 runs them on a CPU with tiny cases: that tests the tests.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.gpu_cells.pytest_runs import (
    OUTCOMES_VARIABLE,
    SECONDS_VARIABLE,
    Began,
    Collected,
    Ended,
    Line,
)
from tests.gpu.cases import DRY

UNUSABLE = 3
"""pytest's exit code when the device answers no more: whatever ran behind that would fail too."""
SHOWN_LINES = 30

_began = time.monotonic()


def _missing() -> str | None:
    """Why nothing here can run."""
    if DRY:
        return None
    if not torch.cuda.is_available():
        return "no CUDA device"
    triton = sys.modules.get("triton")
    if triton is not None and triton.knobs.runtime.interpret:
        return "Triton interprets in this process: TRITON_INTERPRET=0 pytest tests/gpu compiles"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = _missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # What a driver or a compiler warns of on a machine that nobody has seen before is
            # worth reading, and says nothing about whether the kernels are right.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if why is not None:
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_collection_finish(session: pytest.Session) -> None:
    _report(Collected([item.nodeid for item in session.items]))


@pytest.fixture(autouse=True)
def within_the_time() -> Iterator[None]:
    """A test that has not begun when the time is over is skipped; and after each the device must
    still answer."""
    seconds = float(os.environ.get(SECONDS_VARIABLE, "inf"))
    if time.monotonic() - _began > seconds:
        pytest.skip("the time for tests was used up")
    yield
    if not DRY:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu") if DRY else torch.device("cuda", torch.cuda.current_device())


# ---------------------------------------------------------------- what whoever runs this is told


def pytest_runtest_logstart(nodeid: str) -> None:
    _report(Began(nodeid))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.skipped or report.when == "call":
        text = ""
        if report.failed:
            text = "\n".join(report.longreprtext.splitlines()[-SHOWN_LINES:])
        elif report.skipped and isinstance(report.longrepr, tuple):
            text = str(report.longrepr[2]).removeprefix("Skipped: ")
        _report(Ended(report.nodeid, report.outcome, text))
    if report.when == "teardown" and not DRY and _missing() is None and not _usable():
        pytest.exit("the device answers no more", UNUSABLE)


def _usable() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _report(line: Line) -> None:
    file = os.environ.get(OUTCOMES_VARIABLE)
    if file is not None:
        with Path(file).open("ab") as sink:
            sink.write(msgspec.json.encode(line) + b"\n")
