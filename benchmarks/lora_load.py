"""What a running stream feels while adapters are loaded and unloaded, again and again.

    python -m benchmarks.lora_load --url http://127.0.0.1:8000 --model FOLDER [--rank 64]

Streams run without a break while quiet spells and spells full of loads follow each other in one
run: A B A B ... In a loading spell an adapter of the given rank on all seven projections is loaded
on the whole cluster, unloaded, and loaded again at once; each load reads, checks, hashes and keeps
its weights anew, and with `--pinned` it is copied into a slot as well. A spell begins when the load
of the one before has ended.

An inter-token latency is the time between two chunks of one stream, taken at the client, which
shares the machine with the cluster. The rule: p99 while loading is at most 1.5 times that before.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.adapters import AdapterSpec, make_adapter

NAME = "lora-load-benchmark"
PROMPT_TOKENS = 32


@dataclass(slots=True)
class Spell:
    """What happened while nothing, or something, was loaded. Seconds."""

    title: str
    itl_s: list[float] = field(default_factory=list)
    loads_s: list[float] = field(default_factory=list)

    def row(self) -> str:
        cuts = statistics.quantiles(self.itl_s, n=1000)
        points = [statistics.median(self.itl_s), cuts[949], cuts[989], max(self.itl_s)]
        figures = "".join(f"{1000 * point:9.1f}" for point in points)
        return f"{self.title:9}{len(self.itl_s):8}{figures}{len(self.loads_s):8}"

    @property
    def p99_s(self) -> float:
        return statistics.quantiles(self.itl_s, n=100)[98]


class Clock:
    """Which spell it is."""

    def __init__(self) -> None:
        self.quiet, self.loading = Spell("quiet"), Spell("loading")
        self.now = self.quiet
        self.over = asyncio.Event()


async def stream(session: aiohttp.ClientSession, url: str, tokens: int, clock: Clock) -> None:
    """One stream after the other until the clock is over; each gap goes to its spell."""
    prompt = [(7 * number) % 250 + 3 for number in range(PROMPT_TOKENS)]
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    while not clock.over.is_set():
        heard: float | None = None
        async with session.post(url + "/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                if b'"error"' in line:
                    raise RuntimeError(line.decode())
                now = time.perf_counter()
                if heard is not None:
                    clock.now.itl_s.append(now - heard)
                heard = now
                if clock.over.is_set():
                    return


class Loads:
    """Loads and unloads one adapter, everywhere at once."""

    def __init__(
        self, session: aiohttp.ClientSession, urls: Sequence[str], path: Path, pinned: bool
    ) -> None:
        self._session = session
        self._urls = urls
        self._load = {"lora_name": NAME, "lora_path": str(path), "pinned": pinned}

    async def once(self) -> float:
        """Load, unload; the seconds the load took."""
        began = time.perf_counter()
        await self._post("/load_lora_adapter", self._load)
        took = time.perf_counter() - began
        await self._post("/unload_lora_adapter", {"lora_name": NAME})
        return took

    async def _post(self, verb: str, body: object) -> None:
        await asyncio.gather(*(self._post_to(url + verb, body) for url in self._urls))

    async def _post_to(self, verb: str, body: object) -> None:
        async with self._session.post(verb, json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{verb}: {response.status} {await response.text()}")


async def spells(loads: Loads, clock: Clock, rounds: int, seconds: float) -> None:
    """Quiet and loading in turns."""
    for _ in range(rounds):
        clock.now = clock.quiet
        await asyncio.sleep(seconds)
        clock.now = clock.loading
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            clock.loading.loads_s.append(await loads.once())
    clock.over.set()


async def measure(options: argparse.Namespace, path: Path) -> Clock:
    clock = Clock()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        loads = Loads(session, options.load_at or [options.url], path, options.pinned)
        await loads.once()  # the first placement makes the slots' memory
        streams = [
            asyncio.create_task(stream(session, options.url, options.tokens, clock))
            for _ in range(options.streams)
        ]
        spelling = asyncio.create_task(spells(loads, clock, options.rounds, options.seconds))
        await asyncio.gather(spelling, *streams)
    return clock


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--load-at", action="append", help="load on this node, by its own URL, and not on all"
    )
    parser.add_argument("--model", required=True, help="folder of the model that is served")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--pinned", action="store_true", help="copy it into a slot each time")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each spell")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="pdserve-lora-load-") as folder:
        spec = AdapterSpec(rank=options.rank)
        path = make_adapter(Path(options.model), Path(folder) / "adapter", spec)
        clock = asyncio.run(measure(options, path))
    loads = clock.loading.loads_s
    print(f"rank {options.rank}, {options.streams} streams, pinned: {json.dumps(options.pinned)}")
    print(f"{'':9}{'tokens':>8}{'p50 ms':>9}{'p95':>9}{'p99':>9}{'max':>9}{'loads':>8}")
    print(clock.quiet.row())
    print(clock.loading.row())
    ratio = clock.loading.p99_s / clock.quiet.p99_s
    print(f"a load takes {statistics.median(loads):.2f} s (median), {max(loads):.2f} s at most")
    print(f"ITL p99 loading / quiet = {ratio:.2f} (at most 1.5)")
    return 0 if ratio <= 1.5 else 1


if __name__ == "__main__":
    raise SystemExit(main())
