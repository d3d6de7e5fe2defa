"""A cluster over a `Network`: each process on a host of its own, KV over TCP only.

They share a secret, so every ZMQ socket speaks CURVE. The test process stands on the bridge: it
reaches every host's HTTP, and no fault between two hosts touches what it sees.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from common.credentials import ClusterKeys, Secret
from tests.integration.client import Client, client, eventually, is_idle
from tests.integration.oracle import Oracle, random_prompt
from tests.multinode.network import INTERFACE, Host, Network, Rule, network
from tests.processes import Fleet, Place, fleet, showing_logs
from tests.tiny_models import make_tiny_model

NODE_TIMEOUT_S, PEER_TIMEOUT_S, ROUTER_TIMEOUT_S = 1.5, 2.0, 3.0
LEASE_S, LONGEST_POST_S, TCP_TIMEOUT_S, UNPROVEN_S = 3.0, 1.0, 4.0, 8.0
NUM_PAGES = 160
BULK_LOSS = 0.25
"""Share of large packets: a transfer of a few MB takes seconds, and small messages pass."""
ROUTER = "router-0"

Work = list[tuple[list[int], int]]
"""Prompts, and how many tokens to ask for."""

_NODE_FLAGS: dict[str, object] = {
    "dtype": "float32", "num_pages": NUM_PAGES, "chunk_size": 64, "threads": 1, "ucx_tls": "tcp",
    "heartbeat_s": 0.25, "peer_timeout_s": PEER_TIMEOUT_S, "router_timeout_s": ROUTER_TIMEOUT_S,
    "lease_s": LEASE_S, "longest_post_s": LONGEST_POST_S, "unproven_s": UNPROVEN_S,
    "tcp_timeout_s": TCP_TIMEOUT_S,
}  # fmt: skip
_ROUTER_FLAGS: dict[str, object] = {
    "heartbeat_s": 0.25, "node_timeout_s": NODE_TIMEOUT_S, "max_replays_after_death": 8,
    "max_replays_after_fault": 8,
}  # fmt: skip
_SECRET = "for tests only: 4711-0815"
_KEY = ClusterKeys.derive(Secret(_SECRET)).node_key.reveal()
"""Opens every node's HTTP, and here the router's too."""
_ENVIRONMENT = (
    ("UCX_NET_DEVICES", INTERFACE), ("PDSERVE_SECRET", _SECRET), ("PDSERVE_API_KEYS", _KEY),
)  # fmt: skip


def make_model(folder: Path) -> Path:
    """Tiny to compute and large to move: a page is 256 KiB."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    return make_tiny_model("llama", folder, num_hidden_layers=4, **shape)


def make_work(seed: int, count: int, shortest: int) -> Work:
    """Prompts of up to 400 tokens, and how many tokens to ask for."""
    chance = random.Random(seed)
    lengths = [chance.randint(shortest, 400) for _ in range(count)]
    return [(random_prompt(chance, length), chance.randint(10, 40)) for length in lengths]


SOME = make_work(seed=1, count=6, shortest=1)
BULK = make_work(seed=2, count=12, shortest=200)
"""Long prompts, several for each pair of nodes. All tests ask the same, since what takes longest is
to have transformers answer; `Lab` empties the prefix caches in between."""


class Lab:
    """What a test holds: the network, the processes, and what the answers must be."""

    def __init__(self, network: Network, fleet: Fleet, oracle: Oracle) -> None:
        self.network = network
        self.fleet = fleet
        self.oracle = oracle
        self.names = [node.name for node in fleet.nodes]

    def host(self, name: str) -> Host:
        return self.network.host(name)

    def others(self, name: str) -> list[str]:
        """All nodes but this one."""
        return [other for other in self.names if other != name]

    def partners(self, name: str) -> list[str]:
        """The nodes of the other role."""
        return [node.name for node in self.fleet.nodes if node.role != self.fleet[name].role]

    def slow_down(self, name: str) -> list[Rule]:
        """Make every transfer from (prefill) or to (decode) this node take seconds."""
        here = self.host(name)
        rules = []
        for there in map(self.host, self.partners(name)):
            source, target = (here, there) if name.startswith("prefill") else (there, here)
            rules.append(self.network.lose(source, target, BULK_LOSS, large_only=True))
        return rules

    def replace(self, name: str) -> None:
        """`kill -9`, and another process on the same address and ports."""
        self.fleet[name].kill()
        self.fleet[name].start()

    async def make_whole(self) -> None:
        """Heal what a test has done, and wait until everybody is there, idle and empty."""
        self.network.heal()
        for member in self.fleet.members.values():
            if not member.is_alive:
                member.start()
        await self.fleet.ready()
        async with self.client() as session:
            await session.pages_home()
            await session.flush_caches()

    @asynccontextmanager
    async def client(self) -> AsyncIterator["LabClient"]:
        """A session with the router; a failure shows everybody's log."""
        async with showing_logs(self.fleet), client(self.fleet.url, key=_KEY) as session:
            yield LabClient(self, session)


class LabClient:
    """Asks the router, looks at the nodes, and judges the answers."""

    def __init__(self, lab: Lab, session: Client) -> None:
        self.lab = lab
        self.session = session

    async def node(self, name: str) -> dict[str, Any]:
        """A node's own `/server_info`, whatever the router can see of it."""
        return await self.session.node_info({"url": self.lab.fleet[name].url})

    async def queues(self, name: str) -> dict[str, int]:
        return dict((await self.node(name))["stats"].get("queues", {}))

    async def counter(self, node: str, counter: str) -> int:
        return int((await self.node(node))["stats"].get("counters", {}).get(counter, 0))

    async def flush_caches(self) -> None:
        """So that the next test's KV travels although its prompts are the last one's."""
        status, answer = await self.session.post("/flush_cache")
        assert status == 200, answer

    def ask(self, work: Work) -> list[asyncio.Task[list[int]]]:
        """A streaming request for each piece of work, all at once."""
        return [asyncio.create_task(self.session.stream(p, n)) for p, n in work]

    async def check(self, work: Work, tasks: list[asyncio.Task[list[int]]]) -> None:
        """Every answer is the oracle's."""
        answers = await asyncio.gather(*tasks)
        for number, ((prompt, count), answer) in enumerate(zip(work, answers, strict=True)):
            assert answer == self.lab.oracle.answer(prompt, count), f"request {number}"

    async def correct(self, work: Work) -> None:
        await self.check(work, self.ask(work))

    async def until_moving(self, name: str, timeout_s: float = 20.0) -> None:
        """Until KV is surely under way from or to this node, which `Lab.slow_down` was told of."""
        prefills = [n for n in (name, *self.lab.partners(name)) if n.startswith("prefill")]

        async def moving() -> bool:
            posted = sum([(await self.queues(n)).get("inflight", 0) for n in prefills])
            expected = name in prefills or (await self.queues(name)).get("transfer", 0) > 0
            return posted > 0 and expected

        deadline = time.monotonic() + timeout_s
        while not await moving():
            assert time.monotonic() < deadline, f"nothing is under way at {name}"
            await asyncio.sleep(0.01)

    async def pages_home(self, *names: str, timeout_s: float = 40.0) -> None:
        """Until these nodes (all if none are named) hold no request, and no page is set aside."""

        async def home() -> bool:
            infos = [await self.node(name) for name in names or self.lab.names]
            return all(is_idle(info["stats"]) for info in infos)

        async def why() -> object:
            return {name: (await self.node(name))["stats"] for name in names or self.lab.names}

        await eventually(home, timeout_s, why)
        for name in (ROUTER, *(names or self.lab.names)):
            assert self.lab.fleet[name].is_alive, f"{name} has died"


@contextmanager
def lab(folder: Path, prefill: int, decode: int) -> Iterator[Lab]:
    """A cluster on hosts of its own, started and ready. Raises CannotMakeHosts."""
    names = [ROUTER, *(f"prefill-{i}" for i in range(prefill))]
    names += [f"decode-{i}" for i in range(decode)]
    with network() as net:
        hosts = [net.host(name) for name in names]
        model = make_model(folder)
        running = fleet(
            model,
            key=_KEY,
            prefill=prefill,
            decode=decode,
            router_flags=_ROUTER_FLAGS,
            node_flags=_NODE_FLAGS,
            places={h.name: Place(h.address, h.command, _ENVIRONMENT) for h in hosts},
        )
        with running as members:
            yield Lab(net, members, Oracle(model))
