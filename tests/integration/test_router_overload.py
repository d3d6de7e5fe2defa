"""More work than fits, and clients that leave, wait too long or do not read. Stand-in nodes."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.messages import Abort, Generate
from router.tokens import TextCodec
from tests.integration.client import dialled
from tests.integration.router_rig import IDS, Cluster, in_cluster

# ---------------------------------------------------------------- too much work


async def ask(c: Cluster, i: int) -> tuple[int, Any, str | None]:
    """One request, every second one streamed; status, text or error, Retry-After."""
    stream = i % 2 == 0
    body = {"prompt": [*IDS, 35 + i % 60], "max_tokens": 20, "stream": stream}
    async with c.session.post(f"{c.url}/v1/completions", json=body) as response:
        retry = response.headers.get("Retry-After")
        if response.status != 200:
            return response.status, (await response.json())["error"], retry
        if not stream:
            return 200, (await response.json())["choices"][0]["text"], retry
        lines = [line for line in (await response.text()).splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        return 200, "".join(chunk["choices"][0]["text"] for chunk in chunks), retry


@pytest.mark.parametrize(
    ("bound", "says"),
    [
        ({"max_requests": 12}, "requests are unfinished"),
        ({"max_queued_tokens": 100}, "prompt tokens wait"),
        ({"max_kv_oversubscription": 0.25}, "tokens of KV"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_429_and_all_else_is_answered_right(
    model_folder: Path, bound: dict[str, Any], says: str
) -> None:
    async def scenario(c: Cluster) -> None:
        answers = await asyncio.gather(*(ask(c, i) for i in range(120)))
        refused = [(error, retry) for status, error, retry in answers if status == 429]
        for error, retry in refused:
            assert error["type"] == "rate_limit_error"
            assert says in error["message"]
            assert retry is not None
            assert 1 <= int(retry) <= 60
        texts = [(i, text) for i, (status, text, _) in enumerate(answers) if status == 200]
        for i, text in texts:
            assert text == c.text(20, [*IDS, 35 + i % 60])
        assert len(refused) + len(texts) == 120
        assert min(len(refused), len(texts)) >= 8
        info = await c.info()
        assert [node["state"] for node in info["nodes"]] == ["ready", "ready"]
        assert set(info["requests"].values()) == {0}
        async with c.session.get(f"{c.url}/metrics") as response:
            metrics = await response.text()
        reason = {"requests": "requests", "prompt": "queued_tokens", "tokens": "kv"}[
            says.split()[0]
        ]
        assert f'pdserve_router_refused_total{{reason="{reason}"}} {len(refused)}.0' in metrics
        assert "pdserve_router_replays_total{" not in metrics
        assert (await ask(c, 0))[0] == 200

    slow = {"step_s": 0.02, "num_pages": 64, "max_running_requests": 4}
    in_cluster(model_folder, scenario, node_settings=slow, **bound)


def test_a_busy_router_does_not_take_its_own_lateness_for_its_nodes_silence(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """sglang#12355: under load every worker counted as lost."""

    async def scenario(c: Cluster) -> None:
        asking = [asyncio.create_task(ask(c, i)) for i in range(8)]
        await c.eventually(lambda: c.nodes["d1"].rooms)
        for _ in range(3):
            time.sleep(0.9)  # longer than a node may be silent: nothing in this process runs
            await asyncio.sleep(0.05)
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * 8
        assert len(c.nodes["p0"].got(Generate)) == 8
        assert [node["state"] for node in (await c.info())["nodes"]] == ["ready", "ready"]

    in_cluster(model_folder, scenario, node_timeout_s=0.6)
    assert "gave up" not in caplog.text


def test_a_probe_is_taken_in_while_clients_are_refused(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        held = asyncio.create_task(c.complete(60))
        await c.eventually(lambda: c.nodes["d1"].rooms)
        assert (await ask(c, 0))[0] == 429
        assert (await c.get("/health_generate"))[0] == 200
        await held

    in_cluster(model_folder, scenario, max_requests=1)


def test_priority_reaches_the_nodes_in_the_sense_of_each_api(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        sampling = {"max_new_tokens": 2}
        chat = [{"role": "user", "content": "x"}]
        await c.post("/v1/completions", {"prompt": IDS, "max_tokens": 2, "priority": 5})
        await c.post("/v1/chat/completions", {"messages": chat, "max_tokens": 2, "priority": -5})
        await c.post("/generate", {"input_ids": IDS, "sampling_params": sampling, "priority": 5})
        generates = [g for g in c.nodes["p0"].got(Generate) if isinstance(g, Generate)]
        assert [generate.priority for generate in generates] == [5, -5, -5]

    in_cluster(model_folder, scenario)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 1 << 40), ("priority", "high"), ("timeout_s", 0), ("timeout_s", "soon")],
)
def test_bad_terms_are_400(model_folder: Path, path: str, field: str, value: Any) -> None:
    async def scenario(c: Cluster) -> None:
        chat = [{"role": "user", "content": "x"}]
        prompt = {"prompt": IDS, "messages": chat, "input_ids": IDS}
        status, answer = await c.post(path, {**prompt, field: value})
        assert status == 400
        assert answer["error"]["param"] == field

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- time-outs


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_out_ends_the_request_on_both_nodes(model_folder: Path, stream: bool) -> None:
    async def scenario(c: Cluster) -> None:
        body = {"prompt": IDS, "max_tokens": 400, "timeout_s": 0.3, "stream": stream}
        if stream:
            lines = [line for line in await c.lines("/v1/completions", body) if line]
            assert lines[-1] == "data: [DONE]"
            error = json.loads(lines[-2][6:])["error"]
            assert len(lines) > 3
        else:
            status, answer = await c.post("/v1/completions", body)
            assert status == 504
            error = answer["error"]
        assert error["code"] == "timeout"
        await c.eventually(lambda: c.nodes["d1"].got(Abort) and c.nodes["p0"].got(Abort))
        assert not c.nodes["d1"].rooms

    in_cluster(model_folder, scenario)


def test_the_servers_maximum_holds_and_counts_while_paused(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        await c.post("/pause_generation", {"mode": "in_place"})
        body = {"prompt": IDS, "max_tokens": 4, "timeout_s": 1e6}
        status, answer = await c.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert set((await c.info())["requests"].values()) == {0}

    in_cluster(model_folder, scenario, request_timeout_s=0.4)


def test_a_body_that_does_not_come_is_408(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        async with unfinished_body(c) as (reader, _):
            assert b" 408 " in await reader.readline()

    in_cluster(model_folder, scenario, body_timeout_s=0.2)


# ---------------------------------------------------------------- clients that leave


@asynccontextmanager
async def unfinished_body(
    c: Cluster,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request whose body stops in the middle."""
    async with dialled(c.url) as (reader, writer):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
        writer.write(head)
        yield reader, writer


async def arriving(c: Cluster) -> int:
    return await c.metric("pdserve_router_arriving")


async def until(condition: Callable[[], Any], wanted: object) -> None:
    """Poll a coroutine function for a value."""
    async with asyncio.timeout(25):
        while await condition() != wanted:
            await asyncio.sleep(0.01)


def test_leaving_while_the_body_is_read_frees_the_place(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        async with unfinished_body(c):
            await until(lambda: arriving(c), 1)
            assert (await ask(c, 0))[0] == 429  # its place counts
        await until(lambda: arriving(c), 0)
        assert (await ask(c, 0))[0] == 200

    in_cluster(model_folder, scenario, max_requests=1)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Tokenisation of long texts waits for this."""
    opened = asyncio.Event()
    original = TextCodec.encode

    async def waiting(self: TextCodec, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 100:
            await opened.wait()
        return await original(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextCodec, "encode", waiting)
    return opened


LONG = {"prompt": "a" * 101, "max_tokens": 4}


def test_leaving_while_tokenising_frees_the_place_and_nothing_is_sent(
    model_folder: Path, gate: asyncio.Event
) -> None:
    async def scenario(c: Cluster) -> None:
        asking = asyncio.create_task(c.post("/v1/completions", LONG))
        await until(lambda: arriving(c), 1)
        asking.cancel()
        await until(lambda: arriving(c), 0)
        gate.set()
        assert (await ask(c, 0))[0] == 200
        assert len(c.nodes["p0"].got(Generate)) == 1

    in_cluster(model_folder, scenario)


@pytest.mark.parametrize("by_name", [True, False])
def test_an_abort_reaches_a_request_that_is_being_tokenised(
    model_folder: Path, gate: asyncio.Event, by_name: bool
) -> None:
    async def scenario(c: Cluster) -> None:
        headers = {"X-Request-Id": "mine"}
        asking = asyncio.create_task(c.post("/v1/completions", LONG, headers=headers))
        await until(lambda: arriving(c), 1)
        await c.post("/abort_request", {"rid": "another"})
        await c.post("/abort_request", {"rid": "mine"} if by_name else {"abort_all": True})
        gate.set()
        status, answer = await asking
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
        await c.eventually(lambda: not c.nodes["d1"].rooms)

    in_cluster(model_folder, scenario)


@pytest.mark.parametrize("where", ["queued", "paused", "stranded"])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_any_token_leaves_nothing_behind(
    model_folder: Path, where: str, stream: bool
) -> None:
    async def scenario(c: Cluster) -> None:
        if where == "queued":
            fills = [asyncio.create_task(c.complete(300)) for _ in range(2)]
            await c.eventually(lambda: len(c.nodes["d1"].rooms) == 2)
        else:
            fills = []
            await c.post("/pause_generation", {"mode": "in_place"})
        body = {"prompt": [*IDS, 50], "max_tokens": 4, "stream": stream}
        asking = asyncio.create_task(c.post("/v1/completions", body))
        await until(lambda: queued(c), 1)
        if where == "stranded":
            await c.nodes["d1"].die()
        asking.cancel()
        await until(lambda: queued(c), 0)
        await c.post("/continue_generation", {})
        await asyncio.gather(*fills)
        generates = [g for g in c.nodes["p0"].got(Generate) if isinstance(g, Generate)]
        assert body["prompt"] not in [generate.prompt_ids for generate in generates]

    one_at_a_time = {"max_running_requests": 1}
    in_cluster(model_folder, scenario, node_settings=one_at_a_time, node_wait_s=30.0)


async def queued(c: Cluster) -> int:
    return int((await c.info())["requests"]["queued"])


# ---------------------------------------------------------------- clients that do not read


FAST = {"step_s": 0.001, "max_model_len": 10**6, "num_pages": 10**6, "max_running_requests": 64}
MUCH: dict[str, Any] = {"prompt": IDS, "max_tokens": 490, "n": 32, "logprobs": 20, "stream": True}


def test_a_client_that_does_not_read_is_cut_off_and_holds_up_nobody(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        async with deaf_client(c.url, "/v1/completions", MUCH) as reader:
            await c.eventually(lambda: len(c.nodes["d1"].rooms) == MUCH["n"])
            assert (await c.complete(20))["choices"][0]["text"] == c.text(20)
            await c.eventually(lambda: len(c.nodes["d1"].got(Abort)) == MUCH["n"], seconds=25)
            assert (await c.complete(20))["choices"][0]["text"] == c.text(20)
            rest = await reader.read()  # what it gets if it reads after all
            assert b'"slow_client"' in rest[-400:]
        await until(lambda: open_streams(c), 0)
        assert await ended_as(c, "slow_client") == MUCH["n"]

    in_cluster(model_folder, scenario, node_settings=FAST, max_unsent_bytes=100_000)


def test_a_stream_that_stays_unread_is_cut_off_after_a_while(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        async with deaf_client(c.url, "/v1/completions", MUCH):
            await until(lambda: ended_as(c, "slow_client"), MUCH["n"])
            await until(lambda: open_streams(c), 0)
            assert set((await c.info())["requests"].values()) == {0}

    in_cluster(model_folder, scenario, node_settings=FAST, send_timeout_s=0.5)


async def ended_as(c: Cluster, outcome: str) -> int:
    return await c.metric(f'pdserve_router_requests_total{{outcome="{outcome}"}}', 0)


async def open_streams(c: Cluster) -> int:
    return await c.metric("pdserve_router_open_streams")


@asynccontextmanager
async def deaf_client(
    url: str, path: str, body: dict[str, Any]
) -> AsyncIterator[asyncio.StreamReader]:
    """Sends a request and reads nothing; its side of the connection buffers very little."""
    host, port = url.removeprefix("http://").split(":")
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.setblocking(False)
    await asyncio.get_running_loop().sock_connect(deaf, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=deaf, limit=4096)
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    try:
        yield reader
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
