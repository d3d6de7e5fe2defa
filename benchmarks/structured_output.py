"""How many of 200 JSON outputs at temperature 1 validate, while nodes are paused and killed.

    python -m benchmarks.structured_output [--model FOLDER_OR_ID] [--requests 200] [--quiet]

A 1P2D cluster of real processes; each request has a seed and a prompt of its own. A sixth of the
way, half of the way and two thirds of the way everything is retracted in mid-output; at a third a
decode node is killed. `--quiet` leaves the nodes in peace, to compare tokens a second. The judge is
the jsonschema package, which shares no code with what made the outputs.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from deploy.default_model import resolve_model
from tests.cluster_fixture import Cluster, cluster
from tests.integration.client import Client, client
from tests.integration.structured import problem, response_format

AT_ONCE = 32
MAX_TOKENS = 800


@dataclass
class Results:
    """What came of the requests, in order of their end."""

    problems: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return len(self.lengths) + len(self.problems)


async def ask(session: Client, number: int, turns: asyncio.Semaphore, results: Results) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Invent order number {number} as JSON."}],
        "response_format": response_format(),
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": number,
    }
    async with turns:
        status, answer = await session.post("/v1/chat/completions", body)
    if status != 200:
        results.problems.append(f"{status}: {answer}")
        return
    (choice,) = answer["choices"]
    found = problem(choice["message"]["content"])
    if choice["finish_reason"] != "stop":
        results.problems.append(f"{choice['finish_reason']}: {choice['message']['content']!r}")
    elif found is not None:
        results.problems.append(found)
    else:
        results.lengths.append(answer["usage"]["completion_tokens"])


async def disturb(session: Client, c: Cluster, results: Results, requests: int) -> None:
    """The four troubles, each at its share of the requests."""
    for share in (1 / 6, 1 / 3, 1 / 2, 2 / 3):
        while results.ended < share * requests:
            await asyncio.sleep(0.05)
        if share == 1 / 3:
            name = c.nodes("decode")[0].name
            print(f"  {results.ended} ended: killing {name}", flush=True)
            c.kill(name)
            continue
        print(f"  {results.ended} ended: pause retract, continue", flush=True)
        await session.post("/pause_generation", {"mode": "retract"})
        await session.post("/continue_generation", {})


async def measure(c: Cluster, requests: int, *, quiet: bool) -> None:
    results = Results()
    turns = asyncio.Semaphore(AT_ONCE)
    async with client(c.url, timeout_s=3600) as session:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(requests):
                group.create_task(ask(session, number, turns, results))
            if not quiet:
                group.create_task(disturb(session, c, results, requests))
        seconds = time.perf_counter() - began
        retractions = await session.counter("retractions")
    for found in results.problems:
        print(f"  NOT VALID {found}")
    tokens = sum(results.lengths)
    print(f"{len(results.lengths)}/{requests} valid, {retractions} retractions on living nodes")
    median = statistics.median(results.lengths or [0])
    print(f"{tokens} tokens in {seconds:.0f} s, {tokens / seconds:.0f} a second, median {median:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--quiet", action="store_true", help="leave the nodes in peace")
    options = parser.parse_args()
    folder = resolve_model(options.model)
    sizes: dict[str, Any] = {"dtype": "bfloat16", "num_pages": 2200, "max_model_len": 1024}
    # However slow the machine is: what is counted here is what is valid, not what is refused.
    with cluster(folder, decode=2, router_args="--max-queue-s 3600", **sizes) as c:
        asyncio.run(measure(c, options.requests, quiet=options.quiet))


if __name__ == "__main__":
    main()
