"""What adapters cost a running cluster, as ratios of one run.

    python -m benchmarks.lora_overhead [--model FOLDER] [--dtype bfloat16] [--cpus 0 1]

One prefill and one decode node of real processes. In each round, one after the other:

    none        so many streams of the base model, no adapter on the cluster
    unused      the same, with that many adapters loaded and in slots, and nobody asking for them
    each its    every stream with an adapter of its own, all in one batch
    all one     every stream with the same adapter

TPOT is a stream's time between two chunks divided by the tokens between, over the time in which all
streams of the round generate: from the last one's first token to the first one's end. It is taken
at the client, which shares the machine with the cluster. All streams are equally long. A ratio is
the median over the rounds of that variant's median over `none`'s of the same round, so a drift of
the machine hits both alike. Targets: unused 1.0, each its 1.3.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from deploy.default_model import ensure_default_model
from tests.adapters import AdapterSpec, make_adapter
from tests.faults.load import Load, Stream, Work
from tests.faults.matrix import PATIENT
from tests.integration.client import Client, client
from tests.integration.lora_rig import load, unload
from tests.integration.oracle import random_prompt
from tests.processes import fleet

VARIANTS = ("none", "unused", "each its", "all one")
Rounds = dict[str, list[list[float]]]
"""Variant -> for each round the TPOT of its streams in seconds."""


def works(adapters: Sequence[str | None], prompt: int, output: int) -> list[Work]:
    """Only the length of an answer counts here, not what it is."""
    chance = random.Random(len(adapters))
    return [Work(random_prompt(chance, prompt), [0] * output, adapter) for adapter in adapters]


async def answered(url: str, asked: Sequence[Work]) -> list[Stream]:
    """All of these at once. Raises RuntimeError if one has no full answer."""
    async with Load([url], asked) as load_:
        await load_.finish()
    for stream in load_.streams:
        if len(stream.tokens) != len(stream.work.answer):
            raise RuntimeError(stream.describe())
    return load_.streams


def tpots(streams: Sequence[Stream]) -> list[float]:
    """Seconds a token of each. Raises RuntimeError if they did not all generate for a while."""
    since = max(stream.events[0] for stream in streams)
    until = min(stream.events[-1] for stream in streams)
    found = []
    for stream in streams:
        seen = zip(stream.events, stream.counts, strict=False)
        inside = [(at, count) for at, count in seen if since <= at <= until]
        if len(inside) < 2:
            raise RuntimeError("the streams did not run together: ask for more --output tokens")
        (first, had), (last, has) = inside[0], inside[-1]
        found.append((last - first) / (has - had))
    return found


class Variants:
    """Asks in each way, on one cluster."""

    def __init__(
        self, session: Client, adapters: dict[str, Path], options: argparse.Namespace
    ) -> None:
        self._session = session
        self._adapters = adapters
        self._options = options
        self.rounds: Rounds = defaultdict(list)

    async def once(self) -> None:
        """A round; no adapter is loaded before and after."""
        names = list(self._adapters)
        nobody = [None] * len(names)
        await self._measure("none", nobody)
        for name, path in self._adapters.items():
            await load(self._session, name, path)
        await self._ask(names, 4)  # so that all are in their slots
        await self._measure("unused", nobody)
        await self._measure("each its", names)
        await self._measure("all one", names[:1] * len(names))
        for name in names:
            await unload(self._session, name)

    async def _measure(self, variant: str, adapters: Sequence[str | None]) -> None:
        streams = await self._ask(adapters, self._options.output)
        self.rounds[variant].append(tpots(streams))

    async def _ask(self, adapters: Sequence[str | None], output: int) -> list[Stream]:
        return await answered(self._session.url, works(adapters, self._options.input, output))


async def measure(url: str, adapters: dict[str, Path], options: argparse.Namespace) -> Rounds:
    async with client(url, timeout_s=600) as session:
        await Variants(session, adapters, options).once()  # warm-up: torch, slots, connections
        variants = Variants(session, adapters, options)
        for _ in range(options.rounds):
            await variants.once()
    return variants.rounds


def report(rounds: Rounds) -> None:
    print(f"{'':10}{'TPOT ms':>10}{'fastest':>10}{'slowest':>10}{'ratio':>8}   of each round")
    base = [statistics.median(one) for one in rounds["none"]]
    for variant in VARIANTS:
        medians = [statistics.median(one) for one in rounds[variant]]
        flat = [value * 1e3 for one in rounds[variant] for value in one]
        ratios = [mine / theirs for mine, theirs in zip(medians, base, strict=True)]
        shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"{variant:10}{statistics.median(flat):10.2f}{min(flat):10.2f}{max(flat):10.2f}"
            f"{statistics.median(ratios):8.2f}   {shown}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="folder; the default model if not given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=8, help="and adapters")
    parser.add_argument("--rank", type=int, default=16, help="on all seven projections")
    parser.add_argument("--input", type=int, default=16, help="prompt tokens")
    parser.add_argument("--output", type=int, default=128, help="output tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpus", nargs=2, default=("0", "1"), help="of prefill and of decode")
    options = parser.parse_args()
    model = options.model or ensure_default_model()
    with tempfile.TemporaryDirectory(prefix="pdserve-lora-") as folder:
        adapters = {
            f"adapter-{n}": make_adapter(
                model, Path(folder) / str(n), AdapterSpec(rank=options.rank, seed=n)
            )
            for n in range(options.streams)
        }
        with fleet(
            model,
            prefill=1,
            decode=1,
            node_flags={"dtype": options.dtype, "max_loras_per_batch": options.streams},
            prefill_flags={"cpus": options.cpus[0]},
            decode_flags={"cpus": options.cpus[1]},
            router_flags=PATIENT,
        ) as running:
            rounds = asyncio.run(measure(running.url, adapters, options))
    print(
        f"{options.streams} streams, rank {options.rank}, {options.dtype}, {options.rounds} rounds"
    )
    report(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
