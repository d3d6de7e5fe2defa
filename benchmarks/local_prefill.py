"""Where decode had better compute a prompt itself: what it costs those who stream, what it saves.

    python -m benchmarks.local_prefill [--chunks 32 64 128] [--held 0 512] [--lacking 16 ... 512]

One prefill and one decode node of real processes, and two routers over them: one that sends every
request to the pair, one that has decode compute everything itself. While so many streams generate,
one prompt at a time comes in, of which decode lacks `lacking` tokens and both nodes have `held`
cached; through one router and then the other, so that a drift hits both alike. For each size of
decode's chunks (`--local-chunk-size`), as milliseconds:

    TTFT    of the prompt that comes in, median: from its request to its first token
    ITL     of the running streams, median and 99th percentile: between two tokens, of those gaps
            that overlap the time between that request and its first token ("quiet": between two
            such requests)

All are taken at the client, which shares the machine with the cluster. The default thresholds are
where the local TTFT is still the shorter one and the 99th percentile of ITL stays bearable.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from deploy.default_model import ensure_default_model
from tests.faults.matrix import PATIENT
from tests.integration.oracle import random_prompt
from tests.processes import Fleet, fleet

PATHS = ("pair", "local")
REST_S = 0.3
"""Between two prompts, so that the first one's tokens are through."""
LOCAL = {"local_prefill_tokens": 1_000_000, "decode_alone": True}
Gaps = list[tuple[float, float]]


@dataclass(slots=True)
class Cell:
    """One path of one row; seconds."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)


class Asker:
    """Streams of an endpoint, token by token."""

    def __init__(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        self._session = session
        self._chance = chance

    def prompt(self, length: int) -> list[int]:
        return random_prompt(self._chance, length)

    async def ask(self, url: str, prompt: list[int], count: int, gaps: Gaps | None = None) -> float:
        """Stream `count` tokens; returns seconds to the first, adds (from, to) of each gap of one
        token. Raises RuntimeError where it is refused."""
        body = {
            "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        asked = last = time.monotonic()
        first_s, had = 0.0, 0
        async with self._session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(await response.text())
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if not data or data == b"[DONE]":
                    continue
                now, has = time.monotonic(), json.loads(data)["usage"]["completion_tokens"]
                if not had:
                    first_s = now - asked
                elif has == had + 1 and gaps is not None:
                    gaps.append((last, now))
                last, had = now, has
        return first_s


async def row(
    asker: Asker, urls: dict[str, str], gaps: Gaps, held: int, lacking: int, repeats: int
) -> tuple[dict[str, Cell], list[float]]:
    """Both paths in turn, and the gaps of quiet times."""
    prefix = asker.prompt(held)
    if held:
        await asker.ask(urls["pair"], [*prefix, *asker.prompt(1)], 2)
    cells = {path: Cell() for path in PATHS}
    quiet: list[float] = []
    calm_from = time.monotonic()
    for number in range(2 * repeats):
        path = PATHS[number % 2]
        await asyncio.sleep(REST_S)
        asked = time.monotonic()
        first_s = await asker.ask(urls[path], [*prefix, *asker.prompt(lacking)], 2)
        await asyncio.sleep(REST_S)  # the gaps that began meanwhile end
        cells[path].ttft_s.append(first_s)
        cells[path].itl_s += [b - a for a, b in gaps if b > asked and a < asked + first_s]
        quiet += [b - a for a, b in gaps if a > calm_from and b < asked]
        calm_from = time.monotonic() - REST_S
    return cells, quiet


async def measure(running: Fleet, chunk: int, options: argparse.Namespace) -> None:
    urls = dict(zip(PATHS, running.urls, strict=True))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        asker = Asker(session, random.Random(1))
        for path in PATHS:  # warm-up: torch, connections, handshake
            await asker.ask(urls[path], asker.prompt(64), 4)
        for held in options.held:
            for lacking in options.lacking:
                gaps: Gaps = []
                async with streaming(asker, urls["pair"], gaps, options):
                    work = row(asker, urls, gaps, held, lacking, options.repeats)
                    print(line(chunk, held, lacking, *await work), flush=True)


@contextlib.asynccontextmanager
async def streaming(
    asker: Asker, url: str, gaps: Gaps, options: argparse.Namespace
) -> AsyncIterator[None]:
    """So many streams generate, one after the other at each place, until the body is left."""

    async def forever() -> None:
        while True:
            await asker.ask(url, asker.prompt(options.input), options.output, gaps)

    tasks = [asyncio.create_task(forever()) for _ in range(options.streams)]
    try:
        while len(gaps) < 4 * options.streams:
            await asyncio.sleep(0.02)
            for task in tasks:
                if task.done():
                    task.result()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


HEADER = (
    f"{'chunk':>6}{'held':>6}{'lacking':>8} |{'TTFT pair':>10}{'local':>8} |"
    f"{'ITL quiet':>12}{'pair':>14}{'local':>14}"
)


def line(chunk: int, held: int, lacking: int, cells: dict[str, Cell], quiet: list[float]) -> str:
    ttft = [1e3 * statistics.median(cells[path].ttft_s) for path in PATHS]
    itl = [_spread(values) for values in (quiet, *(cells[path].itl_s for path in PATHS))]
    return (
        f"{chunk:6}{held:6}{lacking:8} |{ttft[0]:10.1f}{ttft[1]:8.1f} |"
        f"{itl[0]:>12}{itl[1]:>14}{itl[2]:>14}"
    )


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    ordered = sorted(1e3 * value for value in seconds)
    return f"{statistics.median(ordered):.1f}/{ordered[int(0.99 * (len(ordered) - 1))]:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="folder; the default model if not given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=8, help="that generate meanwhile")
    parser.add_argument("--input", type=int, default=64, help="their prompt tokens")
    parser.add_argument("--output", type=int, default=400, help="their output tokens")
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--held", type=int, nargs="+", default=[0, 512])
    sizes = [16, 32, 64, 128, 256, 512]
    parser.add_argument("--lacking", type=int, nargs="+", default=sizes)
    parser.add_argument("--repeats", type=int, default=8, help="prompts on each path")
    parser.add_argument("--cpus", nargs=2, default=("0", "1"), help="of prefill and of decode")
    options = parser.parse_args()
    model = options.model or ensure_default_model()
    print(f"{options.streams} streams, {options.dtype}; ms, ITL as median/p99")
    print(HEADER, flush=True)
    for chunk in options.chunks:
        with fleet(
            model,
            prefill=1,
            decode=1,
            routers=2,
            node_flags={"dtype": options.dtype},
            prefill_flags={"cpus": options.cpus[0]},
            decode_flags={"cpus": options.cpus[1], "local_chunk_size": chunk},
            router_flags=PATIENT,
            own_flags={"router-1": LOCAL},
        ) as running:
            asyncio.run(measure(running, chunk, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
