"""`python -m benchmarks.gpu --dry-run`: all of its code but CUDA itself, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import main, parse
from benchmarks.gpu_cells.budget import SHARES
from benchmarks.gpu_cells.pytest_runs import FOLDER
from benchmarks.gpu_cells.scale import DRY

ROOT = Path(__file__).parents[3]
SECONDS = 500
"""Far more than it takes where nothing else computes."""


def dry_run(out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Outcomes by the names of their rows."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--model", "random"]
    command += ["--seconds", str(SECONDS), "--out", str(out), "--scratch", str(out), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS + 40,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert (out / "table.md").read_text() in done.stdout
    report = json.loads((out / "figures.json").read_text())
    assert "dry run" in report["machine"]["device"]
    return {outcome["cell"]: outcome for outcome in report["outcomes"]}


def ratio(outcome: dict[str, Any]) -> float:
    figure = outcome["figure"]
    assert figure["bound"] is not None
    middle: float = sorted(figure["values"])[len(figure["values"]) // 2]
    return middle / float(figure["bound"])


@pytest.mark.timeout(SECONDS + 60)
def test_everything_is_measured(tmp_path: Path) -> None:
    rows = dry_run(tmp_path, "--skip-tests")
    assert FOLDER not in rows
    for batch, context in DRY.decode:
        assert f"decode attention, batch {batch}, context {context}" in rows
    for name, outcome in rows.items():
        assert outcome["type"] == "measured", outcome
        # Work that takes as long as its bytes and operations say gives exactly what the card does:
        # another count in the figure than in the clock, or another unit, would not.
        if "attention" in name or ("step" in name and "host" not in name):
            assert ratio(outcome) == pytest.approx(1.0), name
    assert rows["1P1D, 8B-shaped model: worst served token"]["figure"]["values"] == [0.0]


@pytest.mark.timeout(SECONDS + 60)
def test_every_test_passes_in_small(tmp_path: Path) -> None:
    rows = dry_run(tmp_path, "--only", "tests")
    assert list(rows) == [FOLDER]
    assert ratio(rows[FOLDER]) == 1.0, rows[FOLDER]["figure"]["note"]


def test_without_a_card_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--out", str(tmp_path)]) == 2
    assert "there is no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_tests_can_be_left_out() -> None:
    assert parse([]).only == list(SHARES)
    assert parse(["--skip-tests"]).only == [name for name in SHARES if name != "tests"]
