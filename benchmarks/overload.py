"""Overload: what accepted requests feel, and how fast the others are told to come back.

    python -m benchmarks.overload --url http://127.0.0.1:8000

First a closed loop of `--streams` clients measures capacity (requests per second) and the
inter-token latency at it. Then requests come at that rate and at three times that rate, at random
moments that nobody's answer delays (Poisson, open loop). Every request streams; every time is taken
at the client, which shares the machine with the cluster unless it is run elsewhere.

An inter-token latency is the time between two chunks of one stream, divided by the tokens of the
second; the first chunk's wait is the TTFT. Runs end when the last answer has: nothing is cut short.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True)
class Figures:
    """Of one phase; seconds."""

    title: str
    offered: int = 0
    seconds: float = 0.0
    tokens: int = 0
    itl_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    """From sending a request to the whole 429."""
    retry_after_s: list[int] = field(default_factory=list)
    finished: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def requests_per_s(self) -> float:
        return self.finished / self.seconds

    def rows(self) -> list[tuple[str, str]]:
        rows = [
            ("offered", f"{self.offered} ({self.offered / self.seconds:.2f}/s)"),
            ("finished", f"{self.finished} ({self.requests_per_s:.2f}/s)"),
            ("goodput", f"{self.tokens / self.seconds:.0f} tokens/s"),
            ("TTFT ms", _spread(self.ttft_s)),
            ("ITL ms", _spread(self.itl_s)),
        ]
        if self.refused_s:
            share = len(self.refused_s) / self.offered
            rows.append(("429", f"{len(self.refused_s)} ({share:.0%})"))
            rows.append(("time to 429 ms", _spread(self.refused_s)))
            retry = self.retry_after_s
            rows.append(("Retry-After s", f"{min(retry)}-{max(retry)}"))
        rows += [(f"FAULT {what}", str(count)) for what, count in self.faults.items()]
        return rows


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    p50, p99 = percentile(seconds, 0.5), percentile(seconds, 0.99)
    return f"p50 {p50 * 1e3:.1f}  p99 {p99 * 1e3:.1f}  max {max(seconds) * 1e3:.1f}"


class Load:
    """Sends requests of one shape with random prompts, so that no cache helps."""

    def __init__(
        self, session: aiohttp.ClientSession, options: argparse.Namespace, vocab_size: int
    ) -> None:
        self._session = session
        self._vocab_size = vocab_size
        self._options = options
        self._chance = random.Random(options.seed)

    async def one(self, figures: Figures) -> None:
        """One streamed request, from its start to its end."""
        ids = [self._chance.randrange(3, self._vocab_size) for _ in range(self._options.input)]
        sampling = {"max_new_tokens": self._options.output, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        figures.offered += 1
        start = time.perf_counter()
        try:
            async with self._session.post(f"{self._options.url}/generate", json=body) as response:
                if response.status == 200:
                    await self._read(response, start, figures)
                    return
                text = await response.text()
                if response.status == 429:
                    figures.refused_s.append(time.perf_counter() - start)
                    figures.retry_after_s.append(int(response.headers["Retry-After"]))
                else:
                    figures.faults[f"{response.status} {text[:80]}"] += 1
        except aiohttp.ClientError as error:
            figures.faults[type(error).__name__] += 1

    async def _read(self, response: aiohttp.ClientResponse, start: float, figures: Figures) -> None:
        have, last = 0, start
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            now = time.perf_counter()
            if "error" in chunk:
                figures.faults[str(chunk["error"])[:80]] += 1
                return
            count = chunk["meta_info"]["completion_tokens"]
            if have:
                figures.itl_s.append((now - last) / (count - have))
            else:
                figures.ttft_s.append(now - start)
            have, last = count, now
        figures.tokens += have
        figures.finished += 1

    async def closed(self, streams: int, seconds: float) -> Figures:
        """So many clients, each asking again as soon as it has its answer."""
        figures = Figures(f"closed loop, {streams} streams")
        start = time.perf_counter()

        async def client() -> None:
            while time.perf_counter() - start < seconds:
                await self.one(figures)

        await asyncio.gather(*(client() for _ in range(streams)))
        figures.seconds = time.perf_counter() - start
        return figures

    async def open(self, title: str, per_s: float, seconds: float) -> Figures:
        """Requests at random moments, `per_s` of them on average."""
        figures = Figures(title)
        start = due = time.perf_counter()
        asked: list[asyncio.Task[None]] = []
        while due - start < seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asked.append(asyncio.create_task(self.one(figures)))
            due += self._chance.expovariate(per_s)
        await asyncio.gather(*asked)
        figures.seconds = time.perf_counter() - start
        return figures


async def measure(options: argparse.Namespace) -> int:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        async with session.get(f"{options.url}/get_model_info") as response:
            vocab_size = (await response.json())["vocab_size"]
        load = Load(session, options, vocab_size)
        streams = options.streams or await _slots(session, options.url)
        await load.closed(streams, options.warmup)
        capacity = await load.closed(streams, options.seconds)
        show(capacity)
        rate = capacity.requests_per_s
        once = await load.open("open loop, 1x", rate, options.seconds)
        show(once)
        factor = options.factor
        over = await load.open(f"open loop, {factor:g}x", factor * rate, options.seconds)
        show(over)
    return verdict(capacity, over)


def show(figures: Figures) -> None:
    print(f"\n{figures.title}, {figures.seconds:.0f} s")
    for name, value in figures.rows():
        print(f"  {name:<15} {value}", flush=True)


def verdict(capacity: Figures, over: Figures) -> int:
    """Print the two figures that matter; 1 if something failed otherwise than by 429."""
    ratio = percentile(over.itl_s, 0.99) / percentile(capacity.itl_s, 0.99)
    median = statistics.median(over.itl_s) / statistics.median(capacity.itl_s)
    print(f"\nITL under overload / at capacity: p99 {ratio:.2f} (target 1.5), p50 {median:.2f}")
    if over.refused_s:
        print(f"slowest 429: {max(over.refused_s) * 1e3:.1f} ms (target 100)")
    return int(bool(capacity.faults or over.faults))


async def _slots(session: aiohttp.ClientSession, url: str) -> int:
    """Requests that the decode nodes run at once."""
    async with session.get(f"{url}/get_server_info") as response:
        nodes = (await response.json())["nodes"]
    return sum(node["max_running_requests"] for node in nodes if node["role"] == "decode")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, help="of the closed loop; decode's slots if absent")
    parser.add_argument("--input", type=int, default=64, help="prompt tokens")
    parser.add_argument("--output", type=int, default=64, help="output tokens")
    parser.add_argument("--factor", type=float, default=3.0, help="of capacity")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase's arrivals")
    parser.add_argument("--seed", type=int, default=1)
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
