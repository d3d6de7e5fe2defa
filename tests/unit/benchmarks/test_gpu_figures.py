"""The GPU benchmark's table, budget and clocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_cells.budget import cell_allowance, part_deadlines, repetitions
from benchmarks.gpu_cells.figures import (
    Begun,
    Failed,
    Figure,
    Line,
    Measured,
    NotRun,
    Target,
    markdown,
    number,
    read_lines,
    spread,
    verdict,
)
from benchmarks.gpu_cells.stopwatch import ModelledStopwatch, Rates, Work, timed_values
from benchmarks.gpu_cells.worker import encode


def figure(target: Target | None = None) -> Figure:
    return Figure(
        unit="GB/s", values=[80.0, 90.0, 82.0], bound=100.0, bound_name="copy", target=target
    )


def test_a_target_is_met_by_the_median() -> None:
    assert verdict(figure(Target("at least", 0.82))) == "met"
    assert verdict(figure(Target("at least", 0.83))) == "MISSED"
    assert verdict(figure(Target("at most", 0.82))) == "met"
    assert verdict(figure(Target("at most", 0.81))) == "MISSED"
    assert verdict(figure()) == ""


def test_a_table_has_a_row_for_each_outcome_and_says_what_went_wrong() -> None:
    noted = Figure(unit="ms", values=[2.0], note="one | repetition")
    table = markdown(
        [
            Measured("decode", figure(Target("at least", 0.8))),
            Measured("ttft", noted),
            Failed("prefill", "OutOfMemory: no", "line 1\nline 2"),
            NotRun("step", "the time budget was used up"),
        ]
    )
    lines = table.splitlines()
    assert lines[2] == (
        "| decode | 82.0 (80.0-90.0) GB/s | 100 GB/s (copy) | 0.82 (0.80-0.90) | >= 0.80 | met "
        "| 3 |"
    )
    assert lines[3] == "| ttft | 2.00 ms |  |  |  |  | 1 |"
    assert lines[4] == "| prefill | FAILED: OutOfMemory: no |  |  |  |  |  |"
    assert lines[5] == "| step | not run: the time budget was used up |  |  |  |  |  |"
    assert "* ttft: one | repetition" in lines
    assert "    line 2" in lines


def test_numbers_have_three_digits() -> None:
    shown = [number(value) for value in (0, 0.001234, 0.5, 1.234, 12.34, 123.4, 12345.6)]
    assert shown == ["0", "0.00123", "0.5", "1.23", "12.3", "123", "12,346"]
    assert spread([3.0]) == "3.00"
    assert spread([0.5, 0.7, 0.9], fixed=True) == "0.70 (0.50-0.90)"


def test_outcomes_come_back_from_a_file_that_was_cut_off() -> None:
    lines: list[Line] = [Begun("a"), Measured("a", figure()), Begun("b"), Failed("b", "no", "why")]
    raw = b"".join(encode(line) for line in lines)
    assert read_lines(raw) == lines
    assert read_lines(raw[:-5]) == lines[:-1]


def test_parts_share_the_time_in_order() -> None:
    assert part_deadlines(100.0, {"a": 1, "b": 3, "c": 1}) == {"a": 20.0, "b": 80.0, "c": 100.0}


@given(
    left=st.floats(-10, 1000), cells=st.integers(0, 20), one=st.floats(0, 100),
    wanted=st.integers(1, 50),
)  # fmt: skip
def test_repetitions_keep_within_their_cell_s_time(
    left: float, cells: int, one: float, wanted: int
) -> None:
    allowance = cell_allowance(left, cells)
    assert 0 <= allowance * max(1, cells) <= max(0.0, left) + 1e-6
    count = repetitions(allowance, one, wanted)
    assert 1 <= count <= wanted
    assert count == 1 or count * one <= allowance * (1 + 1e-9)


def test_a_model_of_a_card_takes_the_longer_of_two_times() -> None:
    watch = ModelledStopwatch(Rates(copy=1000.0, matrix=10.0))
    ran: list[int] = []
    times = watch.on_device(lambda: ran.append(1), Work(num_bytes=1000, flops=20), 0.0, 4)
    assert times == pytest.approx([2.4, 2.5, 2.6, 2.4])
    slow = watch.on_host(lambda: ran.append(1), Work(num_bytes=3000), 0.0, 1)
    assert slow == pytest.approx([3.6])
    assert ran == [1, 1]


def test_the_first_call_does_not_count_and_a_short_time_means_few() -> None:
    values = iter(range(100))
    assert timed_values(lambda: next(values), 1000.0, 4) == [1, 2, 3, 4]
    assert timed_values(lambda: next(values), 0.0, 4) == [6, 7]
    assert timed_values(lambda: next(values), 0.0, 1) == [9]
