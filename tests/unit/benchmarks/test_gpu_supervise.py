"""Every cell of the GPU benchmark has an outcome, whatever becomes of the process it is in."""

import time
from collections.abc import Sequence

import msgspec
import pytest

from benchmarks.gpu_cells.figures import Begun, Failed, Figure, Line, Measured, NotRun
from benchmarks.gpu_cells.supervise import attempt_in_process, run_group
from benchmarks.gpu_cells.worker import Attempted, Order, attempt_here

FAULTY = "tests.unit.benchmarks.faulty_cells"


def order(*cells: str, group: str = FAULTY) -> Order:
    return Order(
        group=group, cells=list(cells), seconds=0.0, dry=True, copy_rate=None, matrix_rate=None,
        scratch="/nowhere", model="random", outcomes="",
    )  # fmt: skip


def right(cell: str) -> Measured:
    return Measured(cell, Figure(unit="s", values=[1.0]))


class Script:
    """An `Attempt` that was written beforehand; notes which cells it was given."""

    def __init__(self, *attempts: tuple[list[Line], int | None]) -> None:
        self._attempts = iter([Attempted(lines, code, "words") for lines, code in attempts])
        self.given: list[Sequence[str]] = []

    def __call__(self, order: Order, timeout_s: float) -> Attempted:
        self.given.append(order.cells)
        assert order.seconds < timeout_s
        return next(self._attempts)


def test_a_cell_that_ends_its_process_costs_no_other() -> None:
    script = Script(
        ([Begun("a"), right("a"), Begun("b")], -11),
        ([Begun("c"), right("c")], 0),
    )
    outcomes = run_group(order("a", "b", "c"), 10.0, script, clock=lambda: 0.0)
    assert outcomes == [
        right("a"), Failed("b", "the process was ended by signal 11", "words"), right("c"),
    ]  # fmt: skip
    assert script.given == [["a", "b", "c"], ["c"]]


def test_a_card_that_became_unusable_leaves_the_rest_to_a_fresh_process() -> None:
    script = Script(
        ([Begun("a"), Failed("a", "illegal memory access")], 3), ([Begun("b"), right("b")], 0)
    )
    outcomes = run_group(order("a", "b"), 10.0, script, clock=lambda: 0.0)
    assert outcomes == [Failed("a", "illegal memory access"), right("b")]


def test_a_process_that_cannot_begin_is_not_tried_for_ever() -> None:
    script = Script(([], 1))
    outcomes = run_group(order("a", "b"), 10.0, script, clock=lambda: 0.0)
    ended = "the process ended with exit code 1"
    assert outcomes == [Failed("a", ended, "words"), Failed("b", ended, "words")]


def test_what_time_does_not_allow_is_not_run() -> None:
    now = iter([0.0, 11.0])
    script = Script(([Begun("a")], None))
    outcomes = run_group(order("a", "b"), 10.0, script, clock=lambda: next(now))
    assert outcomes == [
        Failed("a", "stopped: it took longer than its share of the time", "words"),
        NotRun("b", "the time budget was used up"),
    ]


def test_one_cell_may_give_several_rows() -> None:
    lines: list[Line] = [Begun("a"), right("a: first"), right("a: second")]
    outcomes = run_group(order("a"), 10.0, Script((lines, 0)), clock=lambda: 0.0)
    assert outcomes == [right("a: first"), right("a: second")]


def test_an_error_in_this_process_is_an_outcome() -> None:
    tried = attempt_here(order("raises", "right"), 1.0)
    assert tried.code == 0
    failed = tried.lines[1]
    assert isinstance(failed, Failed)
    assert failed.error == "ValueError: a shape is wrong"
    assert "_raises" in failed.detail
    assert isinstance(tried.lines[3], Measured)


@pytest.mark.timeout(240)
def test_real_processes_die_one_by_one() -> None:
    cells = ("right", "exits", "crashes", "hangs", "right again")

    def impatient(task: Order, timeout_s: float) -> Attempted:
        hanging = task.cells[0] == "hangs"
        return attempt_in_process(task, 12.0 if hanging else timeout_s)

    outcomes = {
        outcome.cell: outcome
        for outcome in run_group(order(*cells), time.monotonic() + 200, impatient)
        if not (isinstance(outcome, Measured) and outcome.cell == "right")
    }
    exited, crashed, hung = (outcomes[name] for name in ("exits", "crashes", "hangs"))
    assert exited == Failed("exits", "the process ended with exit code 7", "last words")
    assert isinstance(crashed, Failed)
    assert crashed.error == "the process was ended by signal 11"
    assert isinstance(hung, Failed)
    assert hung.error.startswith("stopped")
    assert len(outcomes) == 3, "the two right ones are rows of their own"


def test_an_order_survives_its_file() -> None:
    task = order("a")
    assert msgspec.json.decode(msgspec.json.encode(task), type=Order) == task
