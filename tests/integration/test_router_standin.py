"""The whole router over real sockets, with stand-in nodes that draw known tokens."""

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from common.messages import Abort, Generate, PeerGone, TokenOutput
from common.modes import DisaggregationMode
from router.app import Listening, serve
from router.config import RouterConfig
from router.tokens import TextCodec, load_codec
from tests.standin import StandIn, expected_tokens
from tests.tiny_models import MAX_POSITIONS, VOCAB_SIZE, make_tiny_tokenizer

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
IDS = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
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
    ) -> None:
        self.router = router
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

    async def eventually(self, condition: Callable[[], Any], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@asynccontextmanager
async def cluster(
    folder: Path, nodes: str = "pd", node_settings: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Cluster]:
    """Start a router and one node for each letter of `nodes`: p or d."""
    started: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
    defaults: dict[str, Any] = {
        "port": 0, "node_port": 0, "served_model_name": "tiny", "node_timeout_s": 0.6,
        "heartbeat_s": 0.1, "backoff_s": 0.02, "node_wait_s": 1.0, "admin_timeout_s": 2.0,
    }  # fmt: skip
    config = RouterConfig(**(defaults | settings))
    router = asyncio.create_task(serve(config, folder, ready=started.set_result))
    try:
        router.add_done_callback(lambda _: started.cancel())
        listening = await asyncio.wait_for(started, 10)
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            made = Cluster(folder, listening, session, router)
            for i, letter in enumerate(nodes):
                role = PREFILL if letter == "p" else DECODE
                name = f"{letter}{i}"
                node = StandIn(role, listening.node_address, name, **(node_settings or {}))
                made.nodes[name] = await stack.enter_async_context(node)
            yield made
    finally:
        router.cancel()
        await asyncio.wait([router], timeout=10)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(bounded())


Scenario = Callable[[Cluster], Awaitable[None]]


def in_cluster(folder: Path, scenario: Scenario, nodes: str = "pd", **settings: Any) -> None:
    async def work() -> None:
        async with cluster(folder, nodes, **settings) as made:
            await scenario(made)

    run(work())


# ---------------------------------------------------------------- answers


def test_completion_answers_what_the_nodes_drew(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        answer = await c.complete(12)
        (choice,) = answer["choices"]
        assert choice["text"] == c.text(12)
        assert choice["finish_reason"] == "length"
        assert answer["object"] == "text_completion"
        assert answer["usage"] == {
            "prompt_tokens": 10,
            "completion_tokens": 12,
            "total_tokens": 22,
            "prompt_tokens_details": {"cached_tokens": 8},
        }

    in_cluster(model_folder, scenario)


def test_stream_has_only_data_lines_and_usage_only_when_asked(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body: dict[str, Any] = {"prompt": IDS, "max_tokens": 9, "stream": True}
        lines = [line for line in await c.lines("/v1/completions", body) if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == c.text(9)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]

        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        lines = [line for line in await c.lines("/v1/completions", body) if line]
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 9
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] >= 1

    in_cluster(model_folder, scenario)


def test_chat_stream_begins_with_role_and_content_together(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}
        lines = [line for line in await c.lines("/v1/chat/completions", body) if line]
        first = json.loads(lines[0][6:])
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"][0]["delta"]["role"] == "assistant"
        assert first["choices"][0]["delta"]["content"]
        later = [json.loads(line[6:]) for line in lines[1:-1]]
        assert all("role" not in chunk["choices"][0]["delta"] for chunk in later)

    in_cluster(model_folder, scenario)


def test_openai_python_against_all_of_it(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        async with c.openai() as client:
            models = await client.models.list()
            assert models.data[0].id == "tiny"
            chat = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
                max_completion_tokens=6,
                n=2,
                logprobs=True,
                top_logprobs=2,
            )
            assert len(chat.choices) == 2
            assert chat.choices[0].logprobs is not None
            assert chat.choices[0].logprobs.content is not None
            assert len(chat.choices[0].logprobs.content) == 6
            assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=6,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
            assert text == chat.choices[0].message.content
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 6
            completion = await client.completions.create(
                model="tiny", prompt=["hello", "good day"], max_tokens=4, logprobs=1, echo=False
            )
            assert [choice.index for choice in completion.choices] == [0, 1]
            assert completion.choices[0].logprobs is not None
            assert len(completion.choices[0].logprobs.tokens or ()) == 4
            with pytest.raises(openai.NotFoundError) as missing:
                await client.completions.create(model="other", prompt="a")
            assert missing.value.param == "model"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(model="tiny", prompt="a", temperature=-1)
            assert bad.value.param == "temperature"

    in_cluster(model_folder, scenario)


def test_sglang_generate_is_cumulative(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body: dict[str, Any] = {
            "input_ids": IDS, "sampling_params": {"max_new_tokens": 6}, "rid": "mine",
            "bootstrap_room": 5, "bootstrap_host": "elsewhere",
        }  # fmt: skip
        status, answer = await c.post("/generate", body)
        assert status == 200
        assert answer["text"] == c.text(6)
        assert answer["output_ids"] == expected_tokens(IDS, 6)
        meta = answer["meta_info"]
        assert meta["id"] == "mine"
        assert meta["finish_reason"] == {"type": "length", "length": 6}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (10, 6)
        lines = [line for line in await c.lines("/generate", {**body, "stream": True}) if line]
        texts = [json.loads(line[6:])["text"] for line in lines[:-1]]
        assert texts[-1] == c.text(6)
        assert all(new.startswith(old) for old, new in itertools.pairwise(texts))
        status, answers = await c.post("/generate", {**body, "rid": None, "input_ids": [IDS, IDS]})
        assert [a["text"] for a in answers] == [c.text(6)] * 2

    in_cluster(model_folder, scenario)


def test_stop_string_cuts_the_text_and_aborts_decode(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        whole = c.text(40)
        stop = whole[10:13]
        body = {"prompt": IDS, "max_tokens": 40, "stop": [stop]}
        _, answer = await c.post("/v1/completions", body)
        (choice,) = answer["choices"]
        assert choice["text"] == whole[: whole.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        await c.eventually(lambda: c.nodes["d1"].got(Abort) and not c.nodes["d1"].rooms)
        body["include_stop_str_in_output"] = True
        _, answer = await c.post("/v1/completions", body)
        assert answer["choices"][0]["text"] == whole[: whole.index(stop) + 3]

    in_cluster(model_folder, scenario)


def test_one_token_is_answered_by_prefill_alone(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        assert (await c.complete(1))["choices"][0]["text"] == c.text(1)

    in_cluster(model_folder, scenario, node_settings={"step_s": 0.005})


def test_health_generate_takes_the_path_of_requests(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        assert (await c.get("/health"))[0] == 200
        assert (await c.get("/health_generate"))[0] == 200
        assert c.nodes["p0"].got(Generate)
        await c.nodes["d1"].say_goodbye()
        await asyncio.sleep(0.1)
        assert (await c.get("/health"))[0] == 503
        status, answer = await c.get("/health_generate")
        assert (status, answer["error"]["code"]) == (503, "no_node")

    in_cluster(model_folder, scenario)


def test_several_choices_in_one_stream_with_echo(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        prompts = [c.codec.encode_now("the one"), c.codec.encode_now("a user")]
        written = ["the one", "a user"]
        body = {"prompt": written, "n": 2, "max_tokens": 5, "echo": True}
        lines = [
            line for line in await c.lines("/v1/completions", {**body, "stream": True}) if line
        ]
        texts = dict.fromkeys(range(4), "")
        for line in lines[:-1]:
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
        expected = [
            text + c.text(5, prompt)
            for text, prompt in zip(written, prompts, strict=True)
            for _ in range(2)
        ]
        assert [texts[i] for i in range(4)] == expected
        _, answer = await c.post("/v1/completions", body)
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert answer["usage"]["completion_tokens"] == 20

    in_cluster(model_folder, scenario)


def test_tokenize_and_detokenize_are_inverse(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        _, answer = await c.post("/tokenize", {"prompt": "the user 👍"})
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 512
        _, back = await c.post("/detokenize", {"tokens": answer["tokens"]})
        assert back["prompt"] == "the user 👍"
        status, bad = await c.post("/detokenize", {"tokens": [300]})
        assert (status, bad["error"]["param"]) == (400, "tokens")
        assert (await c.get("/get_model_info"))[1]["eos_token_ids"] == [2]

    in_cluster(model_folder, scenario)


def test_bad_requests_reach_no_node(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        async with c.session.post(f"{c.url}/v1/completions", data=b"{nope") as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "invalid_json"
        assert (await c.post("/v1/chat/completions", {"messages": []}))[0] == 400
        headers = {"X-Request-Id": "two words"}
        status, answer = await c.post("/v1/completions", {"prompt": "a"}, headers=headers)
        assert (status, answer["error"]["param"]) == (400, "x-request-id")
        status, answer = await c.post("/generate", {"text": "a", "sampling_params": {"top_p": 7}})
        assert (status, answer["error"]["param"]) == (400, "sampling_params.top_p")
        status, answer = await c.get("/v1/completions")
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
        assert not c.nodes["p0"].got(Generate)

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- clients that leave


def test_disconnect_in_mid_stream_aborts_on_both_nodes(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body = {"prompt": IDS, "max_tokens": 400, "stream": True}
        async with c.session.post(f"{c.url}/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()
        await c.eventually(lambda: c.nodes["d1"].got(Abort))
        await c.eventually(lambda: not c.nodes["d1"].rooms)
        assert (await c.info())["requests"]["dispatched"] == 0

    in_cluster(model_folder, scenario)


def test_disconnect_without_a_stream_aborts_too(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = asyncio.create_task(c.complete(400))
        await c.eventually(lambda: c.nodes["d1"].rooms)
        asking.cancel()
        await c.eventually(lambda: not c.nodes["d1"].rooms, seconds=1.0)
        assert c.nodes["d1"].got(Abort)

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- nodes that fail


@pytest.mark.parametrize("victim", ["p", "d"])
def test_a_killed_node_does_not_change_the_text(model_folder: Path, victim: str) -> None:
    async def scenario(c: Cluster) -> None:
        prompts = [[*IDS, i] for i in range(40, 48)]
        asking = [asyncio.create_task(c.complete(60, prompt)) for prompt in prompts]
        await c.eventually(lambda: len(c.nodes["d2"].rooms) + len(c.nodes["d3"].rooms) == 8)
        dead = c.nodes["p0" if victim == "p" else "d2"]
        await dead.die()
        for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
            assert answer["choices"][0]["text"] == c.text(60, prompt)
            assert answer["usage"]["completion_tokens"] == 60
        survivor = c.nodes["d3"]
        await c.eventually(lambda: PeerGone(dead.incarnation) in survivor.received)

    in_cluster(model_folder, scenario, nodes="ppdd")


def test_a_silent_node_is_given_up_and_reset_when_it_returns(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = asyncio.create_task(c.complete(200))
        holder = c.nodes["d1"]
        await c.eventually(lambda: c.nodes["d1"].rooms or c.nodes["d2"].rooms)
        if not holder.rooms:
            holder = c.nodes["d2"]
        holder.mute()
        answer = await asking
        assert answer["choices"][0]["text"] == c.text(200)
        assert len((await c.info())["nodes"]) == 2
        holder.unmute()
        await c.eventually(lambda: holder.resets == 1)
        assert not holder.rooms
        assert len((await c.info())["nodes"]) == 3

    in_cluster(model_folder, scenario, nodes="pdd")


def test_a_lost_message_is_noticed_and_nothing_is_missing(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = asyncio.create_task(c.complete(100))
        await c.eventually(lambda: c.nodes["d1"].rooms)
        await asyncio.sleep(0.05)
        c.nodes["d1"].lose_message()
        assert (await asking)["choices"][0]["text"] == c.text(100)
        generates = c.nodes["d1"].got(Generate)
        assert [g.attempt for g in generates if isinstance(g, Generate)] == [1, 2]

    in_cluster(model_folder, scenario)


def test_retraction_continues_where_it_was(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body = {"prompt": IDS, "max_tokens": 80, "stream": True}
        asking = asyncio.create_task(c.lines("/v1/completions", body))
        for _ in range(4):
            await c.eventually(lambda: c.nodes["d1"].rooms)
            await asyncio.sleep(0.05)
            await c.nodes["d1"].retract_all()
        chunks = [json.loads(line[6:]) for line in await asking if line and "[DONE]" not in line]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == c.text(80)
        attempts = [g for g in c.nodes["d1"].got(Generate) if isinstance(g, Generate)]
        assert len({g.room for g in attempts}) == len(attempts) == 5

    in_cluster(model_folder, scenario)


def test_without_nodes_it_is_503_and_a_lost_last_node_too(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        status, answer = await c.post("/v1/completions", {"prompt": IDS})
        assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
        async with (
            StandIn(PREFILL, c.node_address),
            StandIn(DECODE, c.node_address, silent_decode=True) as decode,
        ):
            asking = asyncio.create_task(c.post("/v1/completions", {"prompt": IDS}))
            await c.eventually(lambda: decode.rooms)
            await decode.die()
            status, answer = await asking
            assert status == 503

    in_cluster(model_folder, scenario, nodes="")


def test_an_error_in_a_begun_stream_is_an_event_and_the_end(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body = {"prompt": IDS, "max_tokens": 400, "stream": True}
        asking = asyncio.create_task(c.lines("/v1/completions", body))
        await c.eventually(lambda: c.nodes["d1"].rooms)
        await asyncio.sleep(0.1)
        await c.nodes["d1"].die()
        lines = [line for line in await asking if line]
        assert lines[-1] == "data: [DONE]"
        error = json.loads(lines[-2][6:])["error"]
        assert (error["code"], error["type"]) == ("no_node", "service_unavailable_error")
        assert len(lines) > 3

    in_cluster(model_folder, scenario, node_wait_s=0.2)


def test_a_router_that_ends_answers_everybody_first(model_folder: Path) -> None:
    async def work() -> None:
        async with cluster(model_folder) as c:
            asking = asyncio.create_task(
                c.post("/v1/completions", {"prompt": IDS, "max_tokens": 400})
            )
            await c.eventually(lambda: c.nodes["d1"].rooms)
            c.router.cancel()
            status, answer = await asking
            assert (status, answer["error"]["code"]) == (503, "shutting_down")
            await c.eventually(lambda: c.nodes["d1"].got(Abort))
            await asyncio.wait([c.router], timeout=5)
            assert c.router.cancelled()

    run(work())


def test_garbage_on_the_node_port_is_counted_and_forgotten(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        node = c.nodes["p0"]
        for payload in (b"", b"\xc1\xff", b"not a message", b"\x94\xa1a\xa1b\x01\x81"):
            await node.send_raw(payload)
        await node.send_tokens(TokenOutput(room=12345, index=0, token_ids=[1]))
        assert (await c.complete(10))["choices"][0]["text"] == c.text(10)
        async with c.session.get(f"{c.url}/metrics") as response:
            text = await response.text()
        assert 'pdserve_router_events_total{kind="garbage_frames"} 4.0' in text
        assert 'pdserve_router_events_total{kind="stale_rooms"} 1.0' in text

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- pause


def test_pause_in_place_holds_everything_until_continue(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = [asyncio.create_task(c.complete(60)) for _ in range(4)]
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 4)
        status, answer = await c.post("/pause_generation", {"mode": "in_place"})
        assert status == 200, answer
        assert {node["name"] for node in answer["nodes"]} == {"p0", "d1"}
        late = asyncio.create_task(c.complete(5))
        await asyncio.sleep(0.4)
        assert not any(task.done() for task in [*asking, late])
        assert (await c.info())["requests"]["queued"] == 1
        assert (await c.post("/continue_generation", {}))[0] == 200
        for answer in await asyncio.gather(*asking):
            assert answer["choices"][0]["text"] == c.text(60)
        assert (await late)["choices"][0]["text"] == c.text(5)

    in_cluster(model_folder, scenario)


def test_pause_retract_gives_everything_back_and_replays_it(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = [asyncio.create_task(c.complete(60)) for _ in range(4)]
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 4)
        await c.post("/pause_generation", {"mode": "retract"})
        await c.eventually(lambda: not c.nodes["d1"].rooms)
        assert (await c.post("/flush_cache", {}))[0] == 200
        assert (await c.info())["requests"]["queued"] == 4
        await c.post("/continue_generation", {})
        for answer in await asyncio.gather(*asking):
            assert answer["choices"][0]["text"] == c.text(60)

    in_cluster(model_folder, scenario)


def test_pause_abort_ends_all_with_reason_abort(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = [asyncio.create_task(c.complete(400)) for _ in range(3)]
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 3)
        assert (await c.post("/pause_generation", None))[0] == 200
        for answer in await asyncio.gather(*asking):
            assert answer["choices"][0]["finish_reason"] == "abort"
        held = asyncio.create_task(c.complete(5))
        await asyncio.sleep(0.1)
        assert (await c.post("/abort_request", {"abort_all": True}))[0] == 200
        assert (await held)["choices"][0]["finish_reason"] == "abort"
        await c.post("/continue_generation", {})
        assert (await c.complete(5))["choices"][0]["text"] == c.text(5)

    in_cluster(model_folder, scenario)


def test_pausing_one_node_moves_work_to_the_others(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        assert (await c.post("/pause_generation", {"mode": "retract", "node": "d1"}))[0] == 200
        for _ in range(4):
            await c.complete(5)
        assert not c.nodes["d1"].got(Generate)
        assert (await c.post("/continue_generation", {"node": "d1"}))[0] == 200
        assert (await c.post("/pause_generation", {"mode": "retract", "node": "d2"}))[0] == 200
        await c.complete(5)
        assert c.nodes["d1"].got(Generate)
        assert (await c.post("/pause_generation", {"node": "nobody"}))[0] == 404
        assert (await c.post("/pause_generation", {"mode": "now"}))[0] == 400

    in_cluster(model_folder, scenario, nodes="pdd")


def test_a_verb_does_not_wait_for_ever(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        c.nodes["d1"].mute()
        status, answer = await c.post("/flush_cache", {"node": "d1"})
        assert status == 400
        assert "d1" in answer["message"]

    in_cluster(model_folder, scenario, admin_timeout_s=0.3)


def test_abort_by_request_id(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body = {"prompt": IDS, "max_tokens": 400}
        headers = {"X-Request-Id": "job-7"}
        asking = asyncio.create_task(c.post("/v1/completions", body, headers=headers))
        other = asyncio.create_task(c.complete(60))
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 2)
        await c.post("/abort_request", {"rid": "job-7"})
        _, answer = await asking
        assert answer["id"] == "cmpl-job-7"
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert (await other)["choices"][0]["text"] == c.text(60)

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- limits and info


def test_too_many_unfinished_requests_are_429(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        asking = [asyncio.create_task(c.complete(50)) for _ in range(3)]
        await c.eventually(lambda: len(c.nodes["d1"].rooms) == 3)
        async with c.session.post(f"{c.url}/v1/completions", json={"prompt": IDS}) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
        await asyncio.gather(*asking)

    in_cluster(model_folder, scenario, max_requests=3)


def test_bodies_over_the_limit_are_413_with_the_error_shape(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        status, answer = await c.post("/v1/completions", {"prompt": "a" * 5000})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        async with c.session.get(f"{c.url}/nowhere") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "unknown_url"

    in_cluster(model_folder, scenario, max_body_bytes=4096)


def test_server_info_lists_nodes_and_the_log_has_one_line_a_request(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(c: Cluster) -> None:
        await c.complete(5)
        nodes = {node["name"]: node for node in (await c.info())["nodes"]}
        assert nodes["p0"]["role"] == "prefill"
        needed = "name role url pid state running free_pages cached_pages num_pages incarnation"
        assert set(needed.split()) <= set(nodes["d1"])
        assert nodes["d1"]["num_pages"] == 64

    with caplog.at_level(logging.INFO, "router.requests"):
        in_cluster(model_folder, scenario)
    (record,) = [r for r in caplog.records if r.name == "router.requests"]
    line = json.loads(record.getMessage())
    assert (line["outcome"], line["output_tokens"], line["attempts"]) == ("length", 5, 1)
    assert line["dispatched_s"] <= line["first_token_s"] <= line["ended_s"]
