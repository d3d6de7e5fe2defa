"""Mooncake's conversation trace, made small, on two prefill and two decode nodes.

    python -m benchmarks.trace [--rounds 2] [--speed 1.0] [--only trace talk system]

Two routers of two policies share the nodes and take turns (A B A B), each time from empty caches:
first come the beginnings of prompts that the trace had before the stretch (not measured), then the
stretch at its own pace. That is done with pages for everything, with pages for a sixth of it, and
without a prefix cache. Prints, in Markdown: how many prompt tokens were not computed beside what an
infinite cache would save, what clients waited, how the nodes shared the work. Then conversations
whose turns contain real answers, and prompts that all begin with one system prompt.

A small random model computes: hit rates do not depend on weights, and what is saved shows as soon
as computing a prompt takes much longer than sending it. The client shares the machine.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from benchmarks.infinite_cache import InfiniteCache, saved
from benchmarks.mooncake import Scale, read
from benchmarks.replay import Answer, Player, node_counts
from benchmarks.talk import one_system_prompt, talk
from benchmarks.trace_figures import Figures, table
from tests.faults.matrix import PATIENT
from tests.processes import Fleet, fleet
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

PAGE_SIZE = 16
TOKENS = range(3, VOCAB_SIZE)
MODEL = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
POOLS = {
    "all pages": {"num_pages": 6144},
    "a sixth": {"num_pages": 1024},
    "no cache": {"num_pages": 6144, "prefix_cache": False},
}
"""Flags of the nodes. The stretch and its past are 5341 pages, and some for answers."""
AT_ONCE = 8
"""Requests under way where nothing else sets a pace."""

Bound = int
Load = Callable[[Player], Awaitable[tuple[list[Answer], Bound]]]


class Bench:
    """A running fleet whose first router has the first policy, and so on."""

    def __init__(
        self, running: Fleet, session: aiohttp.ClientSession, options: argparse.Namespace
    ) -> None:
        self._fleet = running
        self._session = session
        self._rounds: int = options.rounds
        urls = zip(options.policies, running.urls, strict=True)
        self._players = {policy: Player(session, url) for policy, url in urls}

    async def compare(self, what: str, load: Load, past: Load | None = None) -> None:
        """Every policy in turn, several times; prints a table."""
        figures = {policy: Figures() for policy in self._players}
        for number in range(self._rounds):
            for policy, player in self._players.items():
                await player.flush()
                if past is not None:
                    await past(player)
                before = await node_counts(self._session, self._fleet)
                answers, bound = await load(player)
                after = await node_counts(self._session, self._fleet)
                figures[policy].add(answers, before, after, bound)
                print(f"{what}, round {number + 1}, {policy} done", file=sys.stderr, flush=True)
        print(f"\n{table(what, figures)}", flush=True)


def mooncake(scale: Scale) -> tuple[Load, Load]:
    """What came before the stretch, and the stretch."""
    stretch = read()
    past = scale.past(stretch.past())
    requests = scale.requests(stretch.lines)
    cache = InfiniteCache(PAGE_SIZE)
    saved([request.prompt for request in past], cache)
    bound = saved([request.prompt for request in requests], cache)

    async def before(player: Player) -> tuple[list[Answer], Bound]:
        return await player.ask_all(past, AT_ONCE), 0

    async def load(player: Player) -> tuple[list[Answer], Bound]:
        return await player.play(requests), bound

    return before, load


async def conversations(player: Player) -> tuple[list[Answer], Bound]:
    done = await talk(player, 1, TOKENS, PAGE_SIZE)
    share = done.prompts_bound / sum(len(answer.prompt) for answer in done.answers)
    print(f"without the answers the bound would be {share:.1%}", file=sys.stderr)
    return done.answers, done.bound


async def strangers(player: Player) -> tuple[list[Answer], Bound]:
    requests = one_system_prompt(1, TOKENS)
    bound = saved([request.prompt for request in requests], InfiniteCache(PAGE_SIZE))
    return await player.ask_all(requests, 2 * AT_ONCE), bound


async def measure(running: Fleet, pool: str, options: argparse.Namespace) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        bench = Bench(running, session, options)
        if "trace" in options.only:
            scale = Scale(block_tokens=options.block_tokens, speed=options.speed, tokens=TOKENS)
            past, load = mooncake(scale)
            await bench.compare(f"trace, {pool}", load, past)
        if pool == "a sixth":
            return
        if "talk" in options.only:
            await bench.compare(f"conversations, {pool}", conversations)
        if "system" in options.only:
            await bench.compare(f"one system prompt, {pool}", strangers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--speed", type=float, default=1.0, help="of arrivals; the trace's is 1")
    parser.add_argument("--block-tokens", type=int, default=16, help="for 512 of the trace")
    parser.add_argument("--pools", nargs="+", default=list(POOLS), choices=POOLS)
    parser.add_argument("--policies", nargs="+", default=["cache_aware", "round_robin"])
    everything = ["trace", "talk", "system"]
    parser.add_argument("--only", nargs="+", default=everything, choices=everything)
    options = parser.parse_args()
    routers = {
        f"router-{number}": {"prefill_policy": policy, "decode_policy": policy}
        for number, policy in enumerate(options.policies)
    }
    with tempfile.TemporaryDirectory(prefix="pdserve-trace-") as folder:
        model = make_tiny_model("llama", Path(folder) / "model", **MODEL)
        for pool in options.pools:
            with fleet(
                model, prefill=2, decode=2, routers=len(options.policies), node_flags=POOLS[pool],
                router_flags=PATIENT, own_flags=routers,
            ) as running:  # fmt: skip
                asyncio.run(measure(running, pool, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
