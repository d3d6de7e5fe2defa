"""Random faults for as long as one likes, every text compared with transformers'.

    python -m benchmarks.soak --minutes 30 [--seed 7] [--router-dies]

Two prefill and two decode nodes with small pools and a router, a tiny float32 model. Prints what
was asked, what was broken and what came of it; the exit code is 1 if a text was wrong, a request
hung or a page is gone.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from random import SystemRandom

from tests.faults.soak import SoakSettings
from tests.faults.soak_fleet import run_soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=SystemRandom().getrandbits(32))
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--router-dies", action="store_true", help="kill the router too")
    options = parser.parse_args()
    settings = SoakSettings(
        seconds=60 * options.minutes,
        seed=options.seed,
        clients=options.clients,
        router_dies=options.router_dies,
    )
    print(settings, flush=True)
    with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as folder:
        report = run_soak(Path(folder), settings, say=print)
    print("\n".join(report.lines()))
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
