"""One GPU: are its kernels right, and how near to what the card can do does everything come?

    python -m benchmarks.gpu              on a machine with a CUDA device, under 8 minutes
    python -m benchmarks.gpu --dry-run    the same code on a CPU with a tiny model: no figure of it
                                          says anything about speed

Prints a Markdown table and writes it, with every repetition as JSON, to `--out`. What fails is a
row that says so, and the others go on. Where time gets short repetitions are dropped, so the whole
ends within `--seconds` (and a little for what is under way). The exit code is 0 only when every row
was measured, every target met and every test passed.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_cells.budget import SECONDS, SHARES, TESTS
from common.config import DEFAULT_MODEL


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU, no GPU")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    parser.add_argument("--only", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="the small model: a folder, an id, or `random`"
    )
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="for a large checkpoint")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder")
    options = parser.parse_args(arguments)
    if options.skip_tests:
        options.only = [name for name in options.only if name != TESTS]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.dry_run:
        # Read when Triton is first imported, which transformers brings along: so before the rest.
        os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.gpu_cells.run import run

    return run(options)


if __name__ == "__main__":
    sys.exit(main())
