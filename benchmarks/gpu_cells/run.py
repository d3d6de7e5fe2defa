"""One run over all parts: who measures what until when, and what becomes of the outcomes.

This process computes nothing on the device: a fault there would end it.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from benchmarks.gpu_cells.budget import SHARES, TESTS, part_deadlines
from benchmarks.gpu_cells.figures import Failed, Measured, Outcome, markdown, verdict
from benchmarks.gpu_cells.pytest_runs import (
    FOLDER,
    files_of_tests,
    jobs_at_a_time,
    pytest_in_process,
    run_files,
)
from benchmarks.gpu_cells.scale import DRY, DRY_RATES, FULL
from benchmarks.gpu_cells.supervise import attempt_in_process, run_group
from benchmarks.gpu_cells.worker import Order, attempt_here, cells_of, describe


class Report(msgspec.Struct, frozen=True):
    """The JSON file."""

    machine: dict[str, str]
    seconds: dict[str, float]
    """How long each part took."""
    outcomes: list[Outcome]


class Run:
    """One run over all parts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._scale = DRY if options.dry_run else FULL
        self._copy: float | None = None
        self._matrix: float | None = None
        self.outcomes: list[Outcome] = []
        self.seconds: dict[str, float] = {}

    def run(self) -> None:
        shares = {name: share for name, share in SHARES.items() if name in self._options.only}
        began = time.monotonic()
        for name, until_s in part_deadlines(self._options.seconds, shares).items():
            start = time.monotonic()
            print(f"{name} ...", file=sys.stderr, flush=True)
            outcomes = self._part(name, began + until_s)
            self.seconds[name] = time.monotonic() - start
            for outcome in outcomes:
                print(f"  {outcome}"[:300], file=sys.stderr, flush=True)
            self.outcomes += outcomes

    def _part(self, name: str, deadline: float) -> list[Outcome]:
        if name == TESTS:
            # A pair over the large model is what the part `serving` checks too.
            pytest = pytest_in_process(self._options.dry_run, ["-m", "not twice"])
            jobs = jobs_at_a_time(os.cpu_count() or 1, self._card_bytes())
            # Importing torch takes longer than tests of tiny cases.
            files = [FOLDER] if self._options.dry_run else files_of_tests()
            return run_files(files, deadline, pytest, jobs)
        try:
            group = f"benchmarks.gpu_cells.{name}"
            cells = list(cells_of(group, self._scale))
        except Exception as error:
            return [Failed(name, describe(error))]
        # A dry run has no card that could become unusable, and little time.
        attempt = attempt_here if self._options.dry_run else attempt_in_process
        outcomes = run_group(self._order(group, cells), deadline, attempt)
        if name == "card":
            self._note_rates(outcomes)
        return outcomes

    def _order(self, group: str, cells: list[str]) -> Order:
        return Order(
            group=group,
            cells=cells,
            seconds=0.0,
            dry=self._options.dry_run,
            copy_rate=self._copy,
            matrix_rate=self._matrix,
            scratch=self._options.scratch,
            model=self._options.model,
            outcomes="",
        )

    def _card_bytes(self) -> int | None:
        if self._options.dry_run:
            return None
        return int(torch.cuda.get_device_properties(0).total_memory)

    def _note_rates(self, outcomes: Sequence[Outcome]) -> None:
        """Of a card that was not measured there are no bounds; a dry run's card is made up."""
        middles = {o.cell: o.figure.middle for o in outcomes if isinstance(o, Measured)}
        if "copy bandwidth" in middles:
            self._copy = middles["copy bandwidth"] * 1e9
        if "matrix rate" in middles:
            self._matrix = middles["matrix rate"] * 1e12


def machine(dry: bool) -> dict[str, str]:
    """What the figures are of."""
    about = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("triton", "nixl"):
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            about[package] = "not installed"
    if dry:
        return {"device": f"none: a dry run on a CPU; the card is made up ({DRY_RATES})", **about}
    if not torch.cuda.is_available():
        return {"device": "no CUDA device", **about}
    properties = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability(0)
    device = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{major}{minor}"
    return {"device": device, "cuda": str(torch.version.cuda), **about}


def report(run: Run, about: dict[str, str], total_s: float, out: Path) -> None:
    """Print the table, and leave it in `out` with the figures behind it."""
    facts = [f"{name}: {value}" for name, value in about.items()]
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in run.seconds.items())
    text = "\n".join([*facts, f"took {total_s:.0f} s: {spent}", "", markdown(run.outcomes)])
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text)
    raw = msgspec.json.encode(Report(about, run.seconds, run.outcomes))
    (out / "figures.json").write_bytes(msgspec.json.format(raw, indent=1))
    print(text)
    print(f"written to {out}/table.md and {out}/figures.json", file=sys.stderr)


def succeeded(outcomes: Sequence[Outcome]) -> bool:
    """Everything was measured, and no target missed."""
    return bool(outcomes) and all(
        isinstance(outcome, Measured) and verdict(outcome.figure) != "MISSED"
        for outcome in outcomes
    )


def run(options: argparse.Namespace) -> int:
    """What the command line asked for; the exit code."""
    about = machine(options.dry_run)
    if not options.dry_run and not torch.cuda.is_available():
        print("there is no CUDA device here; --dry-run does without one", file=sys.stderr)
        return 2
    began = time.monotonic()
    whole = Run(options)
    whole.run()
    report(whole, about, time.monotonic() - began, options.out)
    return 0 if succeeded(whole.outcomes) else 1
