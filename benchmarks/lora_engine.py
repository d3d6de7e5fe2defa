"""What adapters cost the engine: steps with them beside steps of the base model, in turn.

    taskset -c 1 python -m benchmarks.lora_engine [--model FOLDER_OR_ID] [--dtype bfloat16]

Every round runs each kind of step once, so that a drift of the machine hits all alike; a ratio is
the median over rounds of (step / the round's base step). Without a model, random weights in the
shape of SmolLM2-135M: speed does not depend on the values, neither of the model nor of adapters.
With --paths: single rows of adapters by both ways of `common.engine.lora.apply`, at several ranks.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.engine import random_model, smollm2_shape
from common.engine.loader import LoadedModel, load_model, resolve
from common.engine.lora import apply
from common.engine.lora.adapter import Factors, LoraAdapter
from common.engine.lora.pool import LoraPool
from common.engine.lora.targets import targets_of
from common.engine.runner import ModelRunner
from common.engine.spec import ModelSpec
from common.kv_cache.storage import PagedKVCache
from common.messages import SamplingParams
from common.plan import Batch, Row, SlotInit

PAGE_SIZE = 16
MAX_LEN = 1024
CONTEXT = 300
SLOTS = 16
RANK = 16
QUERY_VALUE = ("self_attn.q_proj", "self_attn.v_proj")

Step = Callable[[], object]


def random_adapter(spec: ModelSpec, rank: int, modules: Sequence[str] = ()) -> LoraAdapter:
    """For all targets, or those named."""
    layer = {
        target.module: Factors(
            torch.randn(rank, target.in_features) * 0.01,
            torch.randn(target.out_features, rank) * 0.01,
            2.0,
        )
        for target in targets_of(spec)
        if not modules or target.module in modules
    }
    return LoraAdapter((layer,) * spec.num_layers, rank, "")


class Bench:
    """A runner whose sequences hold `CONTEXT` tokens (their KV is zeros, which costs as much);
    every step computes the same positions."""

    def __init__(self, loaded: LoadedModel, adapters: Sequence[LoraAdapter]) -> None:
        spec = loaded.spec
        self._pages_each = MAX_LEN // PAGE_SIZE
        self._cache = PagedKVCache(
            num_pages=self._pages_each * SLOTS,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            page_size=PAGE_SIZE,
            head_dim=spec.head_dim,
            dtype=loaded.dtype,
        )
        pool = None
        if adapters:
            pool = LoraPool(spec, loaded.dtype, len(adapters), 64)
            for slot, adapter in enumerate(adapters):
                pool.place(slot, adapter, lambda: None)
        self._runner = ModelRunner(loaded, self._cache, SLOTS, MAX_LEN, pool)
        self._cache.clear(torch.arange(self._cache.num_pages))
        for number in range(SLOTS):
            pages, init = self._introduction(number, CONTEXT)
            self._runner.launch(Batch((Row(number, CONTEXT, [5], pages, 1, init),)))

    def decode(self, slots: Sequence[int | None]) -> Step:
        """A token of each of so many sequences, with these adapters."""
        rows = tuple(
            Row(number, CONTEXT, [5], [], 1, lora_slot=slot) for number, slot in enumerate(slots)
        )
        return lambda: self._runner.launch(Batch(rows))

    def prefill(self, tokens: int, slots: Sequence[int | None]) -> Step:
        """Chunks of `tokens` altogether, one of each of these adapters."""
        rows = tuple(
            self._chunk(number, tokens // len(slots), slot) for number, slot in enumerate(slots)
        )
        return lambda: self._runner.launch(Batch(rows))

    def _chunk(self, number: int, tokens: int, slot: int | None) -> Row:
        pages, init = self._introduction(number, tokens)
        return Row(number, 0, list(init.prompt_ids), pages, 0, init, slot)

    def _introduction(self, number: int, tokens: int) -> tuple[list[int], SlotInit]:
        prompt = [(7 * i + number) % 1000 for i in range(tokens)]
        first = number * self._pages_each
        pages = list(range(first, first + self._pages_each))
        return pages, SlotInit(SamplingParams(max_tokens=1, seed=0, temperature=0.0), prompt, [])


def measure(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Wall times in ms of each step, one a round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn:  # the first does not count
                times[name].append((time.perf_counter() - began) * 1e3)
    return times


def report(title: str, steps: Mapping[str, Step], rounds: int) -> None:
    """The first of `steps` is the base."""
    times = measure(steps, rounds)
    base = next(iter(times.values()))
    print(f"\n{title:44}{'ms':>8}{'ratio':>8}{'quartiles':>16}")
    for name, taken in times.items():
        ratios = [mine / its for mine, its in zip(taken, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:44}{statistics.median(taken):8.1f}{middle:8.2f}{low:9.2f} -{high:5.2f}")


def compare(loaded: LoadedModel, rounds: int) -> None:
    spec = loaded.spec
    alone = Bench(loaded, [])
    full = Bench(loaded, [random_adapter(spec, RANK) for _ in range(8)])
    narrow = Bench(loaded, [random_adapter(spec, RANK, QUERY_VALUE) for _ in range(8)])
    ranks = [8, 8, 16, 16, 32, 32, 64, 64]
    mixed = Bench(loaded, [random_adapter(spec, rank) for rank in ranks])
    eight = [3, 1, 0, 7, 5, 6, 2, 4]
    steps = {
        "base model, no pool": alone.decode([None] * 8),
        "base model, 8 adapters loaded": full.decode([None] * 8),
        "1 adapter in 8 rows": full.decode([0] * 8),
        "1 row of 8 with an adapter": full.decode([None] * 7 + [0]),
        "4 rows of 8 with 4 adapters": full.decode([0, None, 1, None, 2, None, 3, None]),
        "4 adapters, 2 rows each": full.decode([0, 1, 2, 3, 3, 2, 1, 0]),
        "8 adapters": full.decode(eight),
        "8 adapters of q and v": narrow.decode(eight),
        "8 adapters of ranks 8 to 64": mixed.decode(eight),
    }
    report("decode, 8 rows, adapters of rank 16", steps, rounds)
    steps = {
        "base model, no pool": alone.decode([None] * 16),
        "base model, 8 adapters loaded": full.decode([None] * 16),
        "8 adapters, 2 rows each": full.decode(eight + eight),
        "8 adapters, 8 rows of the base model": full.decode([*eight, *[None] * 8]),
    }
    report("decode, 16 rows", steps, rounds)
    steps = {
        "base model, no pool": alone.prefill(512, [None]),
        "base model, 8 adapters loaded": full.prefill(512, [None]),
        "1 adapter": full.prefill(512, [0]),
        "4 chunks of the base model": alone.prefill(512, [None] * 4),
        "4 chunks, 4 adapters": full.prefill(512, [0, 1, 2, 3]),
    }
    report("prefill, 512 tokens", steps, max(5, rounds // 5))


def compare_paths(loaded: LoadedModel, rounds: int) -> None:
    """Decode rows of one adapter each, as `Singles` and as a `Share` each."""
    for rank in (8, 16, 32, 64):
        for count in (2, 4, 8):
            adapters = [random_adapter(loaded.spec, rank) for _ in range(count)]
            bench = Bench(loaded, adapters)
            step = bench.decode(list(range(count)))

            def by(max_rank: int, step: Step = step) -> Step:
                def run() -> None:
                    before, apply.MAX_SINGLE_RANK = apply.MAX_SINGLE_RANK, max_rank
                    step()
                    apply.MAX_SINGLE_RANK = before

                return run

            base = bench.decode([None] * count)
            steps = {"base model": base, "singles": by(64), "shares": by(0)}
            report(f"{count} adapters of rank {rank}, a row each", steps, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder or Hugging Face id; random weights if not given")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--paths", action="store_true", help="compare the two ways instead")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.model:
        loaded = load_model(resolve(options.model), options.dtype)
    else:
        loaded = random_model(smollm2_shape(), getattr(torch, options.dtype))
    print(f"{options.dtype}, {options.threads} thread(s), {options.rounds} rounds")
    (compare_paths if options.paths else compare)(loaded, options.rounds)


if __name__ == "__main__":
    main()
