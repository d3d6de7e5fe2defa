"""The router's index of cached pages: memory for a page, time for news, time for a match.

    python -m benchmarks.cache_index

Memory is the growth of a fresh process's resident set, so that allocator overhead counts. Three
ways to share pages: each page on one node; a conversation's pages on one prefill and one decode
node while all nodes have the same 1000 pages of system prompts; and each page on 8 nodes drawn by
chance, which is the worst for an index that keeps equal sets of nodes once.

A match is timed for prompts whose pages every node has (`all hold it`) and for prompts of which the
k-th node has the first k shares (`each drops out`), while the index holds so many other pages. The
median of many matches, each of another prompt: what a prompt's pages cost includes fetching them
from memory.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

from common.messages import CacheUpdate
from router.cache_index import CacheIndex

SYSTEM_PAGES = 1000
PROMPTS = 50
"""Different prompts for each figure."""


class Nodes:
    """Speak to one index."""

    def __init__(self, count: int, num_pages: int) -> None:
        self.index = CacheIndex(max_pages=1 << 40)
        self.names = [f"node-{i:03d}" for i in range(count)]
        self._seq = dict.fromkeys(self.names, 0)
        self.seconds = 0.0
        """In the index."""
        for name in self.names:
            self.index.join(name, num_pages)

    def store(self, name: str, keys: Iterable[int]) -> None:
        self._seq[name] += 1
        stored = array("Q", keys).tobytes()
        began = time.perf_counter()
        self.index.on_update(name, CacheUpdate(seq=self._seq[name], stored=stored), 0.0)
        while self.index.work():
            pass
        self.seconds += time.perf_counter() - began


def fresh_keys(random: Random, count: int) -> "array[int]":
    return array("Q", random.randbytes(8 * count))


# ---------------------------------------------------------------- memory


def private(nodes: Nodes, pages: int, random: Random) -> None:
    for name in nodes.names:
        nodes.store(name, fresh_keys(random, pages // len(nodes.names)))


def conversations(nodes: Nodes, pages: int, random: Random) -> None:
    system = fresh_keys(random, SYSTEM_PAGES)
    half = len(nodes.names) // 2
    for name in nodes.names:
        nodes.store(name, system)
    for prefill, decode in zip(nodes.names[:half], nodes.names[half:], strict=True):
        keys = fresh_keys(random, (pages - SYSTEM_PAGES) // half)
        nodes.store(prefill, keys)
        nodes.store(decode, keys)


def scattered(nodes: Nodes, pages: int, random: Random) -> None:
    held: dict[str, list[int]] = {name: [] for name in nodes.names}
    for key in fresh_keys(random, pages):
        for name in random.sample(nodes.names, 8):
            held[name].append(key)
    for name in nodes.names:
        nodes.store(name, held.pop(name))


SHARINGS: dict[str, Callable[[Nodes, int, Random], None]] = {
    "each page on one node": private,
    "conversations + shared prompts": conversations,
    "each page on 8 random nodes": scattered,
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_memory(sharing: str, pages: int, num_nodes: int) -> tuple[int, int, float, float]:
    """Pages, facts, bytes in the index, seconds of taking in. Run it in a process of its own."""
    random = Random(1)
    nodes = Nodes(num_nodes, 1 << 40)
    before = resident_bytes()
    SHARINGS[sharing](nodes, pages, random)
    facts = sum(map(nodes.index.pages_of, nodes.names))
    return len(nodes.index), facts, float(resident_bytes() - before), nodes.seconds


def memory_table(pages: int, num_nodes: int) -> None:
    print(f"\n| {pages:,} pages, {num_nodes} nodes | facts | MB | bytes a page | us a fact |")
    print("|---|---|---|---|---|")
    spawn = multiprocessing.get_context("spawn")
    for sharing in SHARINGS:
        with spawn.Pool(1) as pool:
            known, facts, size, seconds = pool.apply(measure_memory, (sharing, pages, num_nodes))
        cells = f"{facts:,} | {size / 1e6:.0f} | {size / known:.0f} | {1e6 * seconds / facts:.2f}"
        print(f"| {sharing} | {cells} |", flush=True)


# ---------------------------------------------------------------- matches


def prompts(random: Random, num_pages: int) -> list["array[int]"]:
    return [fresh_keys(random, num_pages) for _ in range(PROMPTS)]


def time_matches(nodes: Nodes, asked: list["array[int]"]) -> float:
    """Median microseconds."""
    taken = []
    for keys in asked:
        listed = keys.tolist()
        began = time.perf_counter()
        found = nodes.index.match(listed)
        taken.append(1e6 * (time.perf_counter() - began))
        assert len(found) == len(nodes.names)
    return statistics.median(taken)


def match_table(sizes: list[int], counts: list[int], prompt_pages: list[int]) -> None:
    print("\n| pages in the index | nodes | of the prompt | all hold it, us | each drops out, us |")
    print("|---|---|---|---|---|")
    random = Random(2)
    for size in sizes:
        for count in counts:
            nodes = Nodes(count, 1 << 40)
            private(nodes, size, random)
            for num_pages in prompt_pages:
                together, apart = prompts(random, num_pages), prompts(random, num_pages)
                for i, name in enumerate(nodes.names):
                    share = max(1, num_pages * (i + 1) // count)
                    nodes.store(name, (key for keys in together for key in keys))
                    nodes.store(name, (key for keys in apart for key in keys[:share]))
                figures = f"{time_matches(nodes, together):.0f} | {time_matches(nodes, apart):.0f}"
                print(f"| {size:,} | {count} | {num_pages} | {figures} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pages", type=int, default=1_000_000, help="of the memory's table")
    parser.add_argument("--nodes", type=int, default=100, help="of the memory's table")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 20, 200])
    parser.add_argument("--prompt-pages", type=int, nargs="+", default=[64, 1024])
    args = parser.parse_args()
    memory_table(args.pages, args.nodes)
    match_table(args.sizes, args.counts, args.prompt_pages)


if __name__ == "__main__":
    main()
