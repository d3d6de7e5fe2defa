"""One slot, two adapters: how long the second waits while the first has a steady stream of work.

    python -m benchmarks.lora_waits [--seconds 40] [--long 200]

A cluster of one prefill and one decode node with room for one adapter at a time, once with draining
(`lora_drain_wait_s` as it is) and once without (1e9). So many clients ask for adapter A without a
break, more than decode runs at once, so that A always has work; one client asks for B, rests, and
asks again, for the last time ten seconds before the end. Then A's clients stop, and B gets what it
still waits for. Waits are from the request to its first token, taken at the client. With draining a
wait is bounded by `lora_drain_wait_s` and A's longest request together. A tiny model: what is
measured is who gets the slot, not how fast it computes.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.adapters import AdapterSpec, make_adapter
from tests.faults.load import Load, Work
from tests.faults.matrix import MODEL, PATIENT
from tests.integration.client import client
from tests.integration.lora_rig import load
from tests.integration.oracle import random_prompt
from tests.processes import fleet
from tests.tiny_models import make_tiny_model

NAMES = ("A", "B")
LAST_TURN_S = 10.0
"""Who asks later than so long before the end cannot have waited long."""
MODES: dict[str, dict[str, object]] = {
    "draining": {},
    "no draining": {"lora_drain_wait_s": 1e9},
}


@dataclass(slots=True)
class Waits:
    """Of one adapter; seconds."""

    first_token_s: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    """From a request's first token to its last."""
    starved: int = 0
    """Answered only after the other one's clients had stopped."""

    def cells(self) -> str:
        waits = sorted(self.first_token_s)
        p90 = waits[int(0.9 * (len(waits) - 1))]
        points = "".join(f"{w:10.2f}" for w in (statistics.median(waits), p90, waits[-1]))
        return f"{len(waits):10}{points}{self.longest_s:10.2f}{self.starved:10}"


class Desk:
    """Clients of both adapters, for some time."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self._url = url
        self._options = options
        self._chance = random.Random(options.seed)
        self._until = time.monotonic() + options.seconds
        self.waits = {name: Waits() for name in NAMES}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._options.streams):
                tasks.create_task(self._ask_until(self._until, "A", self._options.long, 0.0))
            last = self._until - LAST_TURN_S
            rest_s = self._options.rest
            tasks.create_task(self._ask_until(last, "B", self._options.short, rest_s))

    async def _ask_until(self, until: float, name: str, output: int, rest_s: float) -> None:
        await asyncio.sleep(rest_s)  # the slot is A's at first
        while time.monotonic() < until:
            # Only the length of the answer counts; and no two of A end at the same time.
            length = self._chance.randint(output // 2, output)
            work = Work(random_prompt(self._chance, self._options.input), [0] * length, name)
            began = time.monotonic()
            async with Load([self._url], [work]) as one:
                await one.finish()
            (stream,) = one.streams
            if len(stream.tokens) != length:
                raise RuntimeError(stream.describe())
            first, last = stream.events[0], stream.events[-1]
            waits = self.waits[name]
            waits.first_token_s.append(first - began)
            waits.longest_s = max(waits.longest_s, last - first)
            waits.starved += first > self._until and name == "B"
            await asyncio.sleep(rest_s)


async def measure(
    url: str, adapters: dict[str, Path], options: argparse.Namespace
) -> dict[str, Waits]:
    async with client(url) as session:
        for name, path in adapters.items():
            await load(session, name, path)
    desk = Desk(url, options)
    await desk.run()
    return desk.waits


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of each mode")
    parser.add_argument("--streams", type=int, default=12, help="clients of A")
    parser.add_argument("--running", type=int, default=8, help="requests that decode runs at once")
    parser.add_argument("--input", type=int, default=48, help="prompt tokens")
    parser.add_argument("--long", type=int, default=300, help="output tokens of A, at most")
    parser.add_argument("--short", type=int, default=40, help="output tokens of B, at most")
    parser.add_argument("--rest", type=float, default=1.0, help="seconds between B's requests")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    shared = {"max_loras_per_batch": 1, "max_running_requests": options.running, "num_pages": 600}
    title = "".join(
        f"{name:>10}" for name in ("requests", "p50 s", "p90 s", "max s", "longest s", "starved")
    )
    print(f"{'':14}{'adapter':>8}{title}")
    with tempfile.TemporaryDirectory(prefix="pdserve-lora-") as folder:
        model = make_tiny_model("llama", Path(folder) / "model", **MODEL)
        adapters = {
            name: make_adapter(model, Path(folder) / name, AdapterSpec(seed=number))
            for number, name in enumerate(NAMES)
        }
        for mode, flags in MODES.items():
            node_flags = shared | flags
            with fleet(
                model, prefill=1, decode=1, node_flags=node_flags, router_flags=PATIENT
            ) as running:
                waits = asyncio.run(measure(running.url, adapters, options))
            for name in NAMES:
                print(f"{mode:14}{name:>8}{waits[name].cells()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
