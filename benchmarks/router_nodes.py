"""What a request costs the router's decisions at 2 to 200 nodes: the whole dispatcher, no sockets.

    python -m benchmarks.router_nodes

A request here is: admission (at arrival and at acceptance), the choice of both nodes by what they
have cached, the messages that start it, its tokens one by one, its end. Half of the nodes are
prefill nodes. Requests are conversations behind one system prompt, which all nodes have cached;
`--open` of them are unfinished at any time, whatever the number of nodes, and every node sends a
heartbeat twice a second of the time that the requests would take at `--rate` a second.
The table's columns are rounds that take turns, so that a slow moment of the machine hits all sizes.
"""

import argparse
import statistics
import time
from array import array
from collections import deque
from dataclasses import replace
from random import Random

from common.messages import (
    WIRE_VERSION,
    CacheUpdate,
    Envelope,
    Fingerprint,
    Heartbeat,
    Hello,
    NodeAdapters,
    NodeStats,
    SamplingParams,
    StopReason,
    TokenOutput,
    ToRouter,
)
from common.modes import DisaggregationMode
from router.admission import Demand
from router.cache_index import CacheIndex
from router.config import PolicyName
from router.dispatcher import Dispatcher
from router.limits import Limits
from router.nodes import NodeRegistry
from router.page_keys import Lineage, PageKeys
from router.policies import COMPUTE_WEIGHT, make_choice
from router.requests import Job, Output

ME = "router"
PAGES = 50_000
FINGERPRINT = Fingerprint(
    wire_version=WIRE_VERSION,
    model="m",
    dtype="bfloat16",
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=16,
)


DEFAULTS = Limits()


class Deaf:
    """Nobody listens."""

    def deliver(self, output: Output) -> None:
        pass


class Cluster:
    """A router's pure parts and nodes that are only names."""

    def __init__(
        self, num_nodes: int, policy: PolicyName, prompt_tokens: int, limits: Limits = DEFAULTS
    ) -> None:
        self.now = 0.0
        self.random = Random(5)
        self.registry = NodeRegistry(ME, timeout_s=1e9, decode_alone=True)
        self.cache = CacheIndex(2_000_000)
        self.deaf = Deaf()
        self.dispatcher = Dispatcher(
            self.registry,
            replace(limits, waits_for_cached=policy == "cache_aware"),
            choose_prefill=make_choice(policy, self.random, COMPUTE_WEIGHT),
            choose_decode=make_choice(policy, self.random),
            random=self.random,
            cache=self.cache,
        )
        self.system = [self.random.randrange(50_000) for _ in range(prompt_tokens * 3 // 4)]
        self.rest = prompt_tokens - len(self.system)
        self.names = [f"{'pd'[i % 2]}{i}" for i in range(num_nodes)]
        for name in self.names:
            self._join(name)
        self._open: deque[Job] = deque()
        self._beats = 0.0

    def _say(self, name: str, body: ToRouter, *, first: bool = False) -> None:
        node = self.registry.get(name)
        seq = 1 if first or node is None else node.next_from
        envelope = Envelope[ToRouter](name, "" if first else ME, seq, body)
        self.registry.receive(name.encode(), envelope, self.now)

    def _join(self, name: str) -> None:
        role = DisaggregationMode.PREFILL if name[0] == "p" else DisaggregationMode.DECODE
        hello = Hello(
            role=role,
            name=name,
            url="",
            pid=1,
            served_model_name="m",
            fingerprint=FINGERPRINT,
            max_model_len=131_072,
            max_running_requests=256,
            num_pages=PAGES,
            side_channel="tcp://x",
        )
        self._say(name, hello, first=True)
        self._say(name, NodeAdapters([]))
        self.cache.join(name, PAGES)
        keys = PageKeys().of_prefix(Lineage(FINGERPRINT, ""), [*self.system, 0])
        stored = array("Q", keys).tobytes()
        self.cache.on_update(name, CacheUpdate(seq=1, stored=stored), 0.0)
        while self.cache.work():
            pass

    # ------------------------------------------------------------ what is timed

    def request(self, output_tokens: int) -> Job:
        """One request comes and is let in."""
        dispatcher, registry = self.dispatcher, self.registry
        registry.fleet.max_model_len(131_072)
        prompt = self.system + [self.random.randrange(50_000) for _ in range(self.rest)]
        dispatcher.check_room_for(Demand(), 0, self.now)
        demand = Demand(prompt_tokens=len(prompt), kv_tokens=len(prompt) + output_tokens)
        dispatcher.check_room_for(demand, 0, self.now)
        sampling = SamplingParams(max_tokens=output_tokens, seed=1)
        job = dispatcher.submit(f"r{self.now}", "", prompt, sampling, self.deaf, self.now)
        dispatcher.drain()
        return job

    def finish(self, job: Job) -> None:
        """All its tokens come."""
        dispatcher, attempt = self.dispatcher, job.attempt
        assert attempt is not None, "it waits: there are too few nodes for the load"
        first = TokenOutput(room=attempt.room, index=0, token_ids=[7])
        dispatcher.on_tokens(attempt.computes, [first], self.now)
        count = job.sampling.max_tokens
        for index in range(count):
            finish = StopReason.LENGTH if index + 1 == count else None
            output = TokenOutput(room=attempt.room, index=index, token_ids=[7], finish=finish)
            dispatcher.on_tokens(attempt.decode, [output], self.now)
            dispatcher.drain()

    def beat(self, seconds: float) -> None:
        """Time passes: heartbeats that are due."""
        self.now += seconds
        self._beats += seconds * 2 * len(self.names)
        while self._beats >= 1:
            self._beats -= 1
            name = self.random.choice(self.names)
            self._say(name, Heartbeat(stats=NodeStats(num_pages=PAGES), step_age_s=0.0))
            self.dispatcher.on_heartbeat(name, self.now)

    def load(self, count: int, *, open_requests: int, output_tokens: int, rate: float) -> float:
        """Microseconds of CPU a request; heartbeats come, and are not counted."""
        for _ in range(open_requests):
            self._open.append(self.request(output_tokens))
        spent = 0
        for _ in range(count):
            self.now += 1 / rate
            began = time.process_time_ns()
            self._open.append(self.request(output_tokens))
            self.finish(self._open.popleft())
            spent += time.process_time_ns() - began
            self.beat(1 / rate)
        while self._open:
            self.finish(self._open.popleft())
        return spent / count / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 32, 100, 200])
    parser.add_argument("--policies", nargs="+", default=["cache_aware", "least_loaded"])
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--open", type=int, default=1, help="unfinished requests")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=200, help="in a round")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print("\n| policy | " + " | ".join(f"{count} nodes" for count in args.nodes) + " |")
    print("|---" * (1 + len(args.nodes)) + "|")
    for policy in args.policies:
        clusters = [Cluster(count, policy, args.prompt_tokens) for count in args.nodes]
        taken: list[list[float]] = [[] for _ in clusters]
        for _ in range(args.rounds):
            for cluster, times in zip(clusters, taken, strict=True):
                times.append(
                    cluster.load(
                        args.requests,
                        open_requests=args.open,
                        output_tokens=args.output_tokens,
                        rate=args.rate,
                    )
                )
        medians = [statistics.median(times) for times in taken]
        cells = [f"{us:.0f} us ({us / medians[0]:.2f}x)" for us in medians]
        print(f"| {policy} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
