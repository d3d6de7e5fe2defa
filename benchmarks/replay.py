"""Sends prompts of token ids to a cluster, at given times or one after the other, and writes down
what the client saw and what the nodes counted meanwhile."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.mooncake import Request
from tests.integration.client import Client
from tests.processes import Fleet


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's, as its client saw it."""

    prompt: list[int]
    cached_tokens: int
    """As usage says."""
    output: list[int]
    ttft_s: float


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """What a node has done since it started."""

    requests: int = 0
    """That it let in."""
    bytes_sent: int = 0
    """KV, by a prefill node."""

    def __add__(self, other: "NodeCounts") -> "NodeCounts":
        return NodeCounts(self.requests + other.requests, self.bytes_sent + other.bytes_sent)

    def __sub__(self, other: "NodeCounts") -> "NodeCounts":
        return NodeCounts(self.requests - other.requests, self.bytes_sent - other.bytes_sent)


class Player:
    """A client of one router."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def play(self, requests: Sequence[Request]) -> list[Answer]:
        """Each at its time, whatever becomes of the others."""
        start = time.perf_counter()

        async def one(request: Request) -> Answer:
            await asyncio.sleep(request.at_s - (time.perf_counter() - start))
            return await self.ask(request.prompt, request.max_tokens)

        return list(await asyncio.gather(*(one(request) for request in requests)))

    async def ask_all(self, requests: Sequence[Request], at_once: int) -> list[Answer]:
        """As fast as they are answered, never more than `at_once` together."""
        places = asyncio.Semaphore(at_once)

        async def one(request: Request) -> Answer:
            async with places:
                return await self.ask(request.prompt, request.max_tokens)

        return list(await asyncio.gather(*(one(request) for request in requests)))

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        """One streamed, greedy request of exactly `max_tokens` tokens.

        Raises:
            RuntimeError: it was refused or failed; a benchmark that loses requests means nothing.
        """
        sampling = {"max_new_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        start = time.perf_counter()
        ttft_s, last = None, None
        async with self._session.post(f"{self._url}/generate", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                if ttft_s is None:
                    ttft_s = time.perf_counter() - start
                last = json.loads(line[6:])
        if ttft_s is None or last is None or last.get("meta_info", {}).get("finish_reason") is None:
            raise RuntimeError(f"an answer ended with {last}")
        return Answer(prompt, last["meta_info"]["cached_tokens"], last["output_ids"], ttft_s)

    async def flush(self) -> None:
        """Empty every prefix cache."""
        async with self._session.post(f"{self._url}/flush_cache") as response:
            if response.status != 200:
                raise RuntimeError(f"flush: {response.status} {await response.text()}")


async def node_counts(session: aiohttp.ClientSession, fleet: Fleet) -> dict[str, NodeCounts]:
    """Of every node, by name."""
    counts = {}
    for node in fleet.nodes:
        asked = Client(node.url, session)
        stages = await asked.samples("pdserve_stage_seconds_count")
        sent = await asked.samples("pdserve_transfer_bytes_total")
        requests = stages.get((node.role, "queue"), 0)
        counts[node.name] = NodeCounts(int(requests), int(sent.get((node.role,), 0)))
    return counts
