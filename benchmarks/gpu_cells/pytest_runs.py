"""Runs tests/gpu, and makes rows of what came of it.

Each file is run by pytest in a process of its own, some at a time (much of the time goes into
compiling kernels), which writes down each outcome at once (tests/gpu/conftest.py). Where a process
dies, or its card becomes unusable, the tests that had no turn go to a fresh one.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.gpu_cells.figures import Failed, Figure, Measured, NotRun, Outcome, Target

OUTCOMES_VARIABLE = "PDSERVE_GPU_OUTCOMES"
"""File that the tests append lines to."""
SECONDS_VARIABLE = "PDSERVE_GPU_TEST_SECONDS"
"""After so many, tests that have not begun are skipped."""
DRY_VARIABLE = "PDSERVE_GPU_DRY_RUN"
"""Tiny cases on a CPU, under Triton's interpreter."""
GRACE_S = 30.0
SHOWN_FAILURES = 6
"""Of a file; each has a row."""
MOST_JOBS = 6
JOB_BYTES = 20 << 30
"""Of a card's memory: pools of long contexts, and references in float64."""
FOLDER = "tests/gpu"


class Collected(msgspec.Struct, frozen=True, tag="collected"):
    """All tests that this process is going to run."""

    tests: list[str]


class Began(msgspec.Struct, frozen=True, tag="began"):
    test: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    test: str
    outcome: Literal["passed", "failed", "skipped"]
    text: str = ""
    """Why it was skipped, or the end of the failure."""


Line = Collected | Began | Ended


@dataclass(frozen=True, slots=True)
class PytestRun:
    """How a process of pytest fared."""

    lines: list[Line]
    code: int | None
    """Its exit code; None where it was stopped for its time."""


Pytest = Callable[[Sequence[str], float], PytestRun]
"""Runs the tests named (of a file, or single ones) for at most so many seconds."""


def files_of_tests() -> list[str]:
    """All of tests/gpu."""
    return sorted(str(path) for path in Path(FOLDER).glob("test_*.py"))


def jobs_at_a_time(processors: int, card_bytes: int | None) -> int:
    """As many as have two processors and memory each; `card_bytes` is None without a card."""
    room = MOST_JOBS if card_bytes is None else card_bytes // JOB_BYTES
    return max(1, min(MOST_JOBS, processors // 2, room))


def run_files(files: Sequence[str], deadline: float, pytest: Pytest, jobs: int) -> list[Outcome]:
    """`run_tests` for each of `files`, `jobs` at a time; rows in the order of files."""
    with ThreadPoolExecutor(jobs) as pool:
        runs = [pool.submit(run_tests, file, deadline, pytest) for file in files]
        return [outcome for run in runs for outcome in run.result()]


def run_tests(
    file: str, deadline: float, pytest: Pytest, clock: Callable[[], float] = time.monotonic
) -> list[Outcome]:
    """Rows of one file: how many passed, and each failure."""
    ended: dict[str, Ended] = {}
    wanted: list[str] = [file]
    collected: list[str] = []
    while deadline - clock() > 0:
        run = pytest(wanted, deadline - clock())
        collected += [t for line in run.lines if isinstance(line, Collected) for t in line.tests]
        news = _news(run)
        ended |= news
        wanted = [test for test in dict.fromkeys(collected) if test not in ended]
        if not wanted or not news:
            break
    if not collected:
        return [Failed(file, "pytest collected nothing")]
    return _rows(file, list(dict.fromkeys(collected)), ended)


def _news(run: PytestRun) -> dict[str, Ended]:
    """What this process came to; a test in which it ended has failed."""
    ended: dict[str, Ended] = {}
    at: str | None = None
    for line in run.lines:
        match line:
            case Began(test):
                at = test
            case Ended(test):
                ended[test] = line
                at = None
            case Collected():
                pass
    if at is not None:
        stopped = run.code is None
        how = "was stopped for its time" if stopped else f"ended with exit code {run.code}"
        ended[at] = Ended(at, "failed", f"the process {how}")
    return ended


def _rows(file: str, collected: Sequence[str], ended: Mapping[str, Ended]) -> list[Outcome]:
    by_outcome: dict[str, list[Ended]] = {"passed": [], "failed": [], "skipped": []}
    for line in ended.values():
        by_outcome[line.outcome].append(line)
    skipped = by_outcome["skipped"]
    late = len(collected) - len(ended)
    reasons = sorted({line.text for line in skipped})
    missing = f"{len(by_outcome['failed'])} failed, {len(skipped)} skipped, {late} had no turn"
    missing += f" ({'; '.join(reasons)})" if reasons else ""
    complete = len(by_outcome["passed"]) == len(collected)
    figure = Figure(
        unit="passed",
        values=[float(len(by_outcome["passed"]))],
        bound=float(len(collected)),
        bound_name="all",
        target=Target("at least", 1.0),
        note="" if complete else missing,
    )
    rows: list[Outcome] = [Measured(file, figure)]
    for line in by_outcome["failed"][:SHOWN_FAILURES]:
        rows.append(Failed(line.test, _reason(line.text), line.text))
    if len(by_outcome["failed"]) > SHOWN_FAILURES:
        more = len(by_outcome["failed"]) - SHOWN_FAILURES
        rows.append(NotRun(f"{more} more of {file}", "they failed too"))
    return rows


def _reason(text: str) -> str:
    """The error itself, out of a failure as pytest shows it."""
    lines = text.splitlines() or ["no word of why"]
    errors = [line for line in lines if line.startswith("E ")]
    return (errors or lines[-1:])[0].removeprefix("E").strip()[:200]


def pytest_in_process(dry: bool, select: Sequence[str]) -> Pytest:
    """`Pytest` as a process; `select` are arguments that choose among all tests."""

    def run(tests: Sequence[str], seconds: float) -> PytestRun:
        with tempfile.TemporaryDirectory(prefix="pdserve-gpu-") as folder:
            outcomes = Path(folder) / "outcomes"
            outcomes.touch()
            environment = os.environ | {
                OUTCOMES_VARIABLE: str(outcomes),
                SECONDS_VARIABLE: str(seconds),
            }
            environment["TRITON_INTERPRET"] = "1" if dry else "0"
            if dry:
                environment[DRY_VARIABLE] = "1"
            # A kernel that hangs holds the process in a call that no signal interrupts.
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
            command += ["--timeout-method=thread", *select, *tests]
            process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
            try:
                code: int | None = process.wait(seconds + GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
            return PytestRun(decode(outcomes.read_bytes()), code)

    return run


def decode(raw: bytes) -> list[Line]:
    """Lines as they were written; one that was cut off does not count."""
    decoder = msgspec.json.Decoder(Line)
    lines: list[Line] = []
    for text in raw.splitlines():
        try:
            lines.append(decoder.decode(text))
        except msgspec.DecodeError:
            break
    return lines
