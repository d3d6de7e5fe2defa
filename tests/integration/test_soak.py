"""Two minutes of random faults; `benchmarks.soak` runs the same for as long as one likes."""

from pathlib import Path

import pytest

from tests.faults.soak import SoakSettings
from tests.faults.soak_fleet import run_soak

SETTINGS = SoakSettings(seconds=120, seed=20261130)
FLATTEST_MIB_PER_H = 600.0
"""Of a process that lives for a minute, so this sees only what leaks fast; 10 MiB in two minutes is
300. The long soak sees the slow."""


@pytest.mark.timeout(420)
def test_two_minutes_of_random_faults(tmp_path: Path) -> None:
    report = run_soak(tmp_path, SETTINGS)
    shown = "\n".join([f"{SETTINGS}", *report.lines()])
    assert not report.problems(), shown
    assert not report.tally.errors, shown
    assert report.tally.requests > 50, shown
    assert report.tally.faults.total() >= 5, shown
    assert report.memory.slopes()["router"] < FLATTEST_MIB_PER_H, shown
