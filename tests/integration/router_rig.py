"""A whole router over real sockets, with stand-in nodes that draw known tokens."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai

from common.modes import DisaggregationMode
from router.access import Access
from router.app import ANYBODY, Listening, serve
from router.config import RouterConfig
from router.tokens import TextCodec, load_codec
from tests.processes import PAIRS_ONLY
from tests.standin import StandIn, expected_tokens
from tests.tiny_models import MAX_POSITIONS, VOCAB_SIZE, make_tiny_tokenizer

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
IDS = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]


def make_folder(folder: Path) -> Path:
    """A model folder with all that the router reads of one."""
    make_tiny_tokenizer().save_pretrained(folder)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Cluster:
    """A router, its stand-in nodes and an HTTP session."""

    def __init__(
        self,
        folder: Path,
        listening: Listening,
        session: aiohttp.ClientSession,
        router: asyncio.Task[None],
        end: asyncio.Event,
    ) -> None:
        self.router = router
        self.end = end
        """Setting it is a SIGTERM."""
        self.url = listening.http_url
        self.node_address = listening.node_address
        self.session = session
        self.codec: TextCodec = load_codec(folder)
        self.nodes: dict[str, StandIn] = {}

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(f"{self.url}{path}", json=body, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(f"{self.url}{path}") as response:
            return response.status, await response.json()

    async def metric(self, name: str, default: int | None = None) -> int:
        """The value of one sample, labels and all; fails if it is absent and has no `default`."""
        async with self.session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [line for line in lines if line.startswith(f"{name} ")]
        if not found and default is not None:
            return default
        (line,) = found
        return int(float(line.rpartition(" ")[2]))

    async def info(self) -> Any:
        return (await self.get("/get_server_info"))[1]

    async def lines(self, path: str, body: Any) -> list[str]:
        """All lines of a streamed answer."""
        async with self.session.post(f"{self.url}{path}", json=body) as response:
            assert response.status == 200, await response.text()
            return (await response.text()).splitlines()

    async def complete(self, max_tokens: int, prompt: list[int] | None = None) -> Any:
        body = {"prompt": prompt or IDS, "max_tokens": max_tokens}
        status, answer = await self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    def text(self, count: int, prompt: list[int] | None = None) -> str:
        """What an undisturbed request answers."""
        return self.codec.decode(expected_tokens(prompt or IDS, count))

    async def eventually(self, condition: Callable[[], Any], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    async def linked(self) -> None:
        """Until the router may use every pair of the nodes that shake hands."""
        nodes = self.nodes.values()
        prefills = {n.incarnation for n in nodes if n.role is PREFILL}
        decodes = {n.incarnation for n in nodes if n.role is DECODE and n.shakes_hands}
        async with asyncio.timeout(30):
            while True:
                told = {n["incarnation"]: n["linked_peers"] for n in (await self.info())["nodes"]}
                if all(prefills <= set(told.get(decode, ())) for decode in decodes):
                    return
                await asyncio.sleep(0.01)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@asynccontextmanager
async def cluster(
    folder: Path,
    nodes: str = "pd",
    node_settings: dict[str, Any] | None = None,
    access: Access = ANYBODY,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """Start a router and one node for each letter of `nodes`: p or d."""
    started: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
    defaults: dict[str, Any] = {
        "port": 0, "node_port": 0, "served_model_name": "tiny", "node_timeout_s": 1.5,
        "heartbeat_s": 0.1, "backoff_s": 0.02, "node_wait_s": 1.0, "admin_timeout_s": 2.0,
        **PAIRS_ONLY,
    }  # fmt: skip
    config = RouterConfig(**(defaults | settings))
    end = asyncio.Event()
    serving = serve(config, folder, access=access, ready=started.set_result, end=end)
    router = asyncio.create_task(serving)
    try:
        router.add_done_callback(lambda _: started.cancel())
        listening = await asyncio.wait_for(started, 30)
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            made = Cluster(folder, listening, session, router, end)
            for i, letter in enumerate(nodes):
                role = PREFILL if letter == "p" else DECODE
                name = f"{letter}{i}"
                more = {"keys": access.keys, **(node_settings or {})}
                node = StandIn(role, listening.node_address, name, **more)
                made.nodes[name] = await stack.enter_async_context(node)
            if access is ANYBODY:
                await made.linked()
            yield made
    finally:
        router.cancel()
        await asyncio.wait([router], timeout=10)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await work

    asyncio.run(bounded())


Scenario = Callable[[Cluster], Awaitable[None]]


def in_cluster(folder: Path, scenario: Scenario, nodes: str = "pd", **settings: Any) -> None:
    async def work() -> None:
        async with cluster(folder, nodes, **settings) as made:
            await scenario(made)

    run(work())
