"""A bare asynchronous client of the router, for tests."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families


class Refused(AssertionError):
    """A stream was answered with an error before it began."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class Client:
    """One session against one endpoint."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def post(self, path: str, body: object = None) -> tuple[int, Any]:
        async with self._session.post(self.url + path, json=body if body is not None else {}) as r:
            return r.status, await r.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self.url + path) as r:
            text = await r.text()
            return r.status, json.loads(text) if text.startswith(("{", "[")) else text

    async def tokens(
        self, prompt: list[int], count: int, adapter: str | None = None, **sampling: Any
    ) -> list[int]:
        """Exactly `count` greedy tokens, not streamed, of the base model or an adapter."""
        body = self._body(prompt, count, adapter, sampling)
        status, answer = await self.post("/generate", body)
        assert status == 200, answer
        ids: list[int] = answer["output_ids"]
        return ids

    async def stream(
        self,
        prompt: list[int],
        count: int,
        on_chunk: Callable[[int], object] | None = None,
        rid: str | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> list[int]:
        """The same, streamed; `on_chunk` hears how many tokens there are after each chunk."""
        body = self._body(prompt, count, adapter, sampling) | {"stream": True}
        if rid is not None:
            body["rid"] = rid
        ids: list[int] = []
        async with self._session.post(self.url + "/generate", json=body) as response:
            if response.status != 200:
                raise Refused(response.status, await response.text())
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                assert "error" not in chunk, chunk
                grown = chunk["output_ids"]
                assert grown[: len(ids)] == ids
                ids = grown
                if on_chunk is not None:
                    on_chunk(len(ids))
        return ids

    async def in_mid_stream(
        self, work: Iterable[tuple[list[int], int]], chunks: int = 60
    ) -> list[asyncio.Task[list[int]]]:
        """Streams of each (prompt, count), of which so many chunks together have been heard."""
        heard = 0

        def on_chunk(_: int) -> None:
            nonlocal heard
            heard += 1

        streams = [asyncio.create_task(self.stream(p, n, on_chunk)) for p, n in work]
        while heard < chunks:
            await asyncio.sleep(0.01)
        return streams

    async def completion(self, **body: Any) -> tuple[str, str]:
        """Text and finish reason of a completion; with `stream`, put together."""
        async with self._session.post(self.url + "/v1/completions", json=body) as response:
            if response.status != 200:
                raise Refused(response.status, await response.text())
            if not body.get("stream"):
                answers = [await response.json()]
            else:
                lines = (await response.text()).split("\n")
                data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
                answers = [json.loads(line) for line in data]
        choices = [answer["choices"][0] for answer in answers]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]

    @staticmethod
    def _body(
        prompt: list[int], count: int, adapter: str | None, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True} | sampling
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": params}
        return body if adapter is None else body | {"lora_path": adapter}

    async def nodes(self) -> list[dict[str, Any]]:
        _, info = await self.get("/get_server_info")
        nodes: list[dict[str, Any]] = info["nodes"]
        return nodes

    async def node_info(self, node: dict[str, Any]) -> dict[str, Any]:
        """A node's own `/server_info`."""
        async with self._session.get(node["url"] + "/server_info") as response:
            info: dict[str, Any] = await response.json()
            return info

    async def samples(self, name: str, url: str | None = None) -> dict[tuple[str, ...], float]:
        """One of a process's metrics (this one's, or at `url`): label values to value."""
        async with self._session.get((url or self.url) + "/metrics") as response:
            text = await response.text()
        return {
            tuple(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    async def let_in(self) -> dict[str, int]:
        """Node -> requests that it has given pages so far."""
        counts = {}
        for node in await self.nodes():
            stages = await self.samples("pdserve_stage_seconds_count", node["url"])
            counts[node["name"]] = int(stages.get((node["role"], "queue"), 0))
        return counts

    async def counter(self, name: str) -> int:
        """One scheduler counter, summed over all nodes."""
        infos = [await self.node_info(node) for node in await self.nodes()]
        return sum(info["stats"].get("counters", {}).get(name, 0) for info in infos)

    async def all_idle(self) -> bool:
        """No node holds a request or a page, and none that died is still in the router's list."""
        try:
            infos = [await self.node_info(node) for node in await self.nodes()]
        except aiohttp.ClientConnectionError:
            return False
        return all(is_idle(info["stats"]) for info in infos)

    async def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Until every node is empty with all its pages free or cached."""
        await eventually(self.all_idle, timeout_s, self.nodes)


def is_idle(stats: dict[str, Any]) -> bool:
    """Whether a node holds no request and could give away every page, cached ones too."""
    free: int = stats.get("free_pages", 0)
    return free == stats["num_pages"] and not any(stats.get("queues", {}).values())


async def eventually(
    check: Callable[[], Awaitable[bool]],
    timeout_s: float,
    explain: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Wait until `check` holds; fail with what `explain` says when it never does."""
    deadline = time.monotonic() + timeout_s
    while not await check():
        if time.monotonic() > deadline:
            why = await explain() if explain is not None else ""
            raise AssertionError(f"not within {timeout_s} s: {why}")
        await asyncio.sleep(0.1)


@asynccontextmanager
async def dialled(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare TCP connection to `scheme://host:port`, closed afterwards; what is unsent gets 1 s."""
    host, port = address.rpartition("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), 1)
        writer.transport.abort()


@asynccontextmanager
async def client(
    url: str, timeout_s: float = 90.0, key: str | None = None
) -> AsyncIterator[Client]:
    """`key` is shown to the router and, since the session asks them too, to its nodes."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=headers
    ) as session:
        yield Client(url, session)
