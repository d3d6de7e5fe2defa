"""What the GPU benchmark makes of its tests, also of those in which their process ends."""

import time
from collections.abc import Sequence

import pytest

from benchmarks.gpu_cells.figures import Failed, Measured, NotRun, Outcome
from benchmarks.gpu_cells.pytest_runs import (
    Began,
    Collected,
    Ended,
    Line,
    PytestRun,
    decode,
    files_of_tests,
    jobs_at_a_time,
    run_files,
    run_tests,
)

FILE = "tests/gpu/test_norm.py"


class Script:
    """A `Pytest` that was written beforehand; notes which tests it was told to run."""

    def __init__(self, *runs: tuple[list[Line], int | None]) -> None:
        self._runs = list(runs)
        self.told: list[Sequence[str]] = []

    def __call__(self, tests: Sequence[str], seconds: float) -> PytestRun:
        assert seconds > 0
        self.told.append(list(tests))
        return PytestRun(*self._runs.pop(0))


def passed(test: str) -> list[Line]:
    return [Began(test), Ended(test, "passed")]


def summary(outcomes: list[Outcome]) -> tuple[float, float, str]:
    first = outcomes[0]
    assert isinstance(first, Measured)
    assert first.cell == FILE
    return first.figure.values[0], first.figure.bound or 0.0, first.figure.note


def run(script: Script) -> list[Outcome]:
    return run_tests(FILE, 10.0, script, clock=lambda: 0.0)


def test_all_passed() -> None:
    script = Script(([Collected(["a", "b"]), *passed("a"), *passed("b")], 0))
    outcomes = run(script)
    assert summary(outcomes) == (2, 2, "")
    assert len(outcomes) == 1
    assert script.told == [[FILE]]


def test_a_failure_has_a_row_and_a_skipped_test_counts_as_missing() -> None:
    failure = Ended("a", "failed", "def test\nE   assert 1 == 2\nE    +  where\ntest.py:3: ...")
    late = Ended("b", "skipped", "the time for tests was used up")
    outcomes = run(Script(([Collected(["a", "b"]), Began("a"), failure, Began("b"), late], 1)))
    note = "1 failed, 1 skipped, 0 had no turn (the time for tests was used up)"
    assert summary(outcomes) == (0, 2, note)
    assert outcomes[1] == Failed("a", "assert 1 == 2", failure.text)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-11, "the process ended with exit code -11"),
        (None, "the process was stopped for its time"),
    ],
)
def test_a_test_that_ends_its_process_costs_no_other(code: int | None, text: str) -> None:
    script = Script(
        ([Collected(["a", "b", "c"]), *passed("a"), Began("b")], code),
        ([Collected(["c"]), *passed("c")], 0),
    )
    outcomes = run(script)
    assert summary(outcomes) == (2, 3, "1 failed, 0 skipped, 0 had no turn")
    assert outcomes[1] == Failed("b", text, text)
    assert script.told == [[FILE], ["c"]]


def test_a_process_that_gets_nowhere_is_not_started_for_ever() -> None:
    script = Script(([Collected(["a"])], 1))
    assert summary(run(script)) == (0, 1, "0 failed, 0 skipped, 1 had no turn")
    assert run(Script(([], 4))) == [Failed(FILE, "pytest collected nothing")]


def test_the_end_of_the_time_is_the_end() -> None:
    now = iter([0.0, 0.0, 11.0])
    script = Script(([Collected(["a", "b"]), *passed("a"), Began("b")], None))
    outcomes = run_tests(FILE, 10.0, script, clock=lambda: next(now))
    assert summary(outcomes) == (1, 2, "1 failed, 0 skipped, 0 had no turn")


def test_many_failures_are_cut_off_with_a_word() -> None:
    names = [f"t{number}" for number in range(20)]
    lines: list[Line] = [Collected(names)]
    for name in names:
        lines += [Began(name), Ended(name, "failed", "no")]
    outcomes = run(Script((lines, 1)))
    assert len(outcomes) == 8
    assert outcomes[-1] == NotRun(f"14 more of {FILE}", "they failed too")


def test_lines_that_were_cut_off_do_not_count() -> None:
    assert decode(b'{"type":"began","test":"a"}\n{"type":"ended","te') == [Began("a")]


def test_files_are_run_side_by_side_and_told_in_order() -> None:
    files = files_of_tests()
    assert "tests/gpu/test_attention.py" in files

    def pytest(tests: Sequence[str], seconds: float) -> PytestRun:
        (file,) = tests
        return PytestRun([Collected([file + "::a"]), *passed(file + "::a")], 0)

    outcomes = run_files(files, time.monotonic() + 60, pytest, jobs=3)
    assert [outcome.cell for outcome in outcomes if isinstance(outcome, Measured)] == files


def test_small_machines_and_small_cards_run_fewer_at_a_time() -> None:
    gib = 1 << 30
    assert jobs_at_a_time(16, 141 * gib) == 6
    assert jobs_at_a_time(16, 48 * gib) == 2
    assert jobs_at_a_time(16, 16 * gib) == 1
    assert jobs_at_a_time(2, None) == 1
    assert jobs_at_a_time(8, None) == 4
