"""Two minutes of random faults; `benchmarks.soak` runs the same for as long as one likes."""

from pathlib import Path

import pytest

from tests.faults.soak import SoakSettings
from tests.faults.soak_fleet import run_soak

SETTINGS = SoakSettings(seconds=120, seed=20261130)
STEEPEST_MIB_PER_H = 900.0
"""Judged over the second minute, so this sees only what leaks fast: 15 MiB in it. The long soak
sees the slow."""


@pytest.mark.timeout(420)
def test_two_minutes_of_random_faults(tmp_path: Path) -> None:
    report = run_soak(tmp_path, SETTINGS)
    shown = "\n".join([f"{SETTINGS}", *report.lines()])
    assert not report.problems(), shown
    assert not report.tally.errors, shown
    assert report.tally.requests > 50, shown
    assert report.tally.faults.total() >= 5, shown
    assert min(report.paths.values()) > 20, shown
    slopes = report.memory.slopes()
    assert set(slopes) == {"router", "prefill", "decode"}, shown
    assert max(slopes.values()) < STEEPEST_MIB_PER_H, shown
