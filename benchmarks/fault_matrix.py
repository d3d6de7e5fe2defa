"""The fault matrix as a table: cells, passed, slowest recovery.

    python -m benchmarks.fault_matrix [--only prefill-kill]

The same cells as `tests/integration/test_fault_matrix.py`, on the same small model.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.faults.matrix import CELLS, Arena, Cell, Outcome

Row = tuple[str, str]


async def run_cells(arena: Arena, cells: list[Cell]) -> dict[Cell, Outcome | str]:
    """Each cell's outcome, or what was wrong; a failed one does not end the rest."""
    await arena.warm_up()
    results: dict[Cell, Outcome | str] = {}
    for cell in cells:
        try:
            results[cell] = outcome = await arena.run(cell)
        except AssertionError as error:
            results[cell] = str(error)
            print(f"{cell}: FAILED {error}", flush=True)
            await arena.mend()
        else:
            print(
                f"{cell}: went on after {outcome.recovery_s:.1f} s, {outcome.whole} whole answers, "
                f"{outcome.replays} replays",
                flush=True,
            )
    return results


def table(results: dict[Cell, Outcome | str]) -> list[str]:
    """Markdown, a row for each role and fault."""
    rows: dict[Row, list[Outcome | str]] = defaultdict(list)
    for cell, result in results.items():
        rows[cell.role, cell.fault.value].append(result)
    lines = ["| victim | fault | cells | passed | slowest recovery s |", "|---|---|---|---|---|"]
    for (role, fault), outcomes in rows.items():
        passed = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
        slowest = max((outcome.recovery_s for outcome in passed), default=float("nan"))
        lines.append(f"| {role} | {fault} | {len(outcomes)} | {len(passed)} | {slowest:.1f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="cells whose name contains this")
    options = parser.parse_args()
    cells = [cell for cell in CELLS if options.only in str(cell)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pdserve-matrix-") as folder:
        arena = Arena.prepare(Path(folder))
        try:
            arena.fleet.start()
            results = asyncio.run(run_cells(arena, cells))
        finally:
            arena.fleet.close()
    print("\n".join(table(results)))
    passed = sum(isinstance(result, Outcome) for result in results.values())
    print(f"{passed} of {len(results)} cells passed in {time.monotonic() - began:.0f} s")
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
