"""Conversations behind one system prompt, routed by each policy: tokens computed, and how evenly.

    python -m benchmarks.router_spread

The router's decisions are real, the nodes only names whose caches never forget. Half of the
conversations begin with the same 1024 tokens; each has 2 to 10 turns, and each turn adds to what
was said before. `--at-once` requests are given to nodes before the first of them is done.
`infinite` is what one cache for all would have, were every prompt computed before the next came.
The spread is the busiest prefill node's computed tokens over the idlest one's. Decode computes no
prompts here.
"""

import argparse
from array import array
from collections import Counter
from dataclasses import dataclass
from random import Random

from benchmarks.router_nodes import FINGERPRINT, Cluster
from common.messages import CacheUpdate, SamplingParams
from router import policies
from router.config import PolicyName
from router.limits import Limits
from router.local_prefill import LocalLimits
from router.page_keys import Lineage, PageKeys
from router.requests import Job

PAIRS_ONLY = Limits(local=LocalLimits(tokens=0, share=1.0))
SYSTEM_TOKENS = 1024
FIRST_TOKENS = (200, 500, 1500, 3000)
TURN_TOKENS = (50, 100, 300)


@dataclass(slots=True)
class Talk:
    """One conversation."""

    tokens: list[int]
    turns: int


class Replay(Cluster):
    """All conversations, some at a time."""

    def __init__(self, num_nodes: int, policy: PolicyName) -> None:
        super().__init__(num_nodes, policy, prompt_tokens=0, limits=PAIRS_ONLY)
        self._chance = Random(3)
        self._shared = self._draw(SYSTEM_TOKENS)
        self._said: Counter[str] = Counter(dict.fromkeys(self.names, 1))
        self._everything: set[int] = set()
        self.computed: Counter[str] = Counter()
        self.prompt_tokens = self.ideal_tokens = 0

    def _draw(self, count: int) -> list[int]:
        return [self._chance.randrange(50_000) for _ in range(count)]

    def run(self, conversations: int, at_once: int) -> None:
        talks: list[Talk] = []
        begun = 0
        while begun < conversations or talks:
            while len(talks) < 4 * len(self.names) and begun < conversations:
                shared = self._shared if self._chance.random() < 0.5 else []
                first = self._draw(self._chance.choice(FIRST_TOKENS))
                talks.append(Talk([*shared, *first], self._chance.randint(2, 10)))
                begun += 1
            speaking = self._chance.sample(talks, min(at_once, len(talks)))
            self._answer([(talk, self._ask(talk)) for talk in speaking])
            talks = [talk for talk in talks if talk.turns]

    def _ask(self, talk: Talk) -> Job:
        sampling, now = SamplingParams(max_tokens=4, seed=1), self.now
        job = self.dispatcher.submit("r", "", list(talk.tokens), sampling, self.deaf, now)
        self.dispatcher.drain()
        return job

    def _answer(self, asked: list[tuple[Talk, Job]]) -> None:
        """In turns, since those that wait at the router start when others are done."""
        while asked:
            running = [(talk, job) for talk, job in asked if job.attempt is not None]
            asked = [(talk, job) for talk, job in asked if job.attempt is None]
            for talk, job in running:
                self._count(job)
                self.finish(job)
                talk.tokens += self._draw(self._chance.choice(TURN_TOKENS))
                talk.turns -= 1

    def _count(self, job: Job) -> None:
        attempt, keys = job.attempt, PageKeys().of_prefix(Lineage(FINGERPRINT, ""), job.prompt_ids)
        assert attempt is not None
        found = self.cache.match(keys)
        size = FINGERPRINT.page_size
        hit = size * found.get(attempt.computes, 0)
        self.computed[attempt.computes] += len(job.prompt_ids) - hit
        known = next((i for i, key in enumerate(keys) if key not in self._everything), len(keys))
        self.prompt_tokens += len(job.prompt_ids)
        self.ideal_tokens += len(job.prompt_ids) - size * known
        self._everything.update(keys)
        for node in attempt.nodes:
            self._said[node] += 1
            stored = array("Q", keys[found.get(node, 0) :]).tobytes()
            self.cache.on_update(node, CacheUpdate(seq=self._said[node], stored=stored), 0.0)
        while self.cache.work():
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8], help="of each role")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--conversations", type=int, default=30, help="for each prefill node")
    args = parser.parse_args()
    print("\n| prefill nodes | at once | policy | hit rate | infinite | spread |")
    print("|---|---|---|---|---|---|")
    fair = policies.FAIR_SHARE
    cases: list[tuple[str, PolicyName, float]] = [
        ("cache_aware", "cache_aware", fair),
        ("the same, recent work ignored", "cache_aware", 1e9),
        ("least_loaded", "least_loaded", fair),
        ("round_robin", "round_robin", fair),
    ]
    for count in args.nodes:
        for at_once in args.at_once:
            for title, policy, share in cases:
                policies.FAIR_SHARE = share
                replay = Replay(2 * count, policy)
                replay.run(args.conversations * count, at_once)
                hit = 1 - sum(replay.computed.values()) / replay.prompt_tokens
                bound = 1 - replay.ideal_tokens / replay.prompt_tokens
                spread = max(replay.computed.values()) / min(replay.computed.values())
                cells = f"{count} | {at_once} | {title} | {hit:.3f} | {bound:.3f} | {spread:.2f}"
                print(f"| {cells} |", flush=True)


if __name__ == "__main__":
    main()
