"""What each known client sends, and how it reads the answer, replayed against a whole router.

The bodies are those that the clients' own code makes (versions: docs/compatibility.md); the readers
do what theirs do, no more careful than they are. A stream is read line by line; whatever is no
`data:` line would break one of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.router_rig import IDS, Cluster, in_cluster
from tests.standin import expected_tokens

COUNT = 6
TEXT = "the user asks the one"
CHAT = [{"role": "user", "content": TEXT}]


async def data_of(c: Cluster, path: str, body: Any, **headers: str) -> list[str]:
    """The payloads of a stream's lines, all of which are data."""
    async with c.session.post(c.url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [line for line in (await response.text()).split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def objects(payloads: list[str]) -> Iterator[Any]:
    assert payloads[-1] == "[DONE]"
    for payload in payloads[:-1]:
        yield json.loads(payload)


# ---------------------------------------------------------------- vllm bench serve


def test_vllm_bench_on_completions(model_folder: Path) -> None:
    """Any chunk with choices is the first token; usage comes in one with none."""

    async def scenario(c: Cluster) -> None:
        models = (await c.get("/v1/models"))[1]["data"][0]
        assert (models["id"], bool(models["root"])) == ("tiny", True)
        body = {
            "model": "tiny", "prompt": TEXT, "repetition_penalty": 1.0, "max_tokens": COUNT,
            "logprobs": None, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "temperature": 0.0,
        }  # fmt: skip
        payloads = await data_of(c, "/v1/completions", body, **{"x-request-id": "bench-0"})
        text, tokens, firsts = "", None, 0
        for chunk in objects(payloads):
            if choices := chunk.get("choices"):
                firsts += 1
                text += choices[0].get("text") or ""
            elif usage := chunk.get("usage"):
                tokens = usage.get("completion_tokens")
        assert (text, tokens) == (c.text(COUNT, c.codec.encode_now(TEXT)), COUNT)
        assert firsts <= COUNT, "no chunk without a token: it would be timed as one"

        body["prompt"] = IDS  # --backend openai with token ids
        text = "".join(
            chunk["choices"][0]["text"]
            for chunk in objects(await data_of(c, "/v1/completions", body))
            if chunk["choices"]
        )
        assert text == c.text(COUNT)

    in_cluster(model_folder, scenario)


def test_vllm_bench_on_chat(model_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}],
            "max_completion_tokens": COUNT, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        text, tokens = "", None
        for chunk in objects(await data_of(c, "/v1/chat/completions", body)):
            if choices := chunk.get("choices"):
                text += choices[0]["delta"].get("content") or ""
            elif usage := chunk.get("usage"):
                tokens = usage.get("completion_tokens")
        assert tokens == COUNT
        assert len(text) == COUNT

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- SGLang bench_serving


def test_sglang_bench_on_its_own_api(model_folder: Path) -> None:
    """`text` and `completion_tokens` are cumulative; every line is JSON or the end."""

    async def scenario(c: Cluster) -> None:
        written: list[dict[str, Any]] = [{"text": TEXT}, {"input_ids": IDS}]
        for prompt in written:
            body = {
                **prompt,
                "sampling_params": {
                    "temperature": 0.0, "max_new_tokens": COUNT, "ignore_eos": True,
                },
                "stream": True, "lora_path": None, "return_logprob": False,
                "return_routed_experts": False, "logprob_start_len": -1,
            }  # fmt: skip
            text, before, gaps = "", 0, 0
            for data in objects(await data_of(c, "/generate", body)):
                if data["text"]:
                    text = data["text"]
                    count = data["meta_info"]["completion_tokens"]
                    gaps += count - before
                    before = count
                assert data["meta_info"]["prompt_tokens"] > 0
                assert data["meta_info"]["cached_tokens"] >= 0
            ids = IDS if "input_ids" in prompt else c.codec.encode_now(TEXT)
            assert (text, gaps) == (c.text(COUNT, ids), COUNT)

    in_cluster(model_folder, scenario)


def test_sglang_bench_on_openais_apis(model_folder: Path) -> None:
    """It asks for no usage, and reads the first choice of every chunk unguarded."""

    async def scenario(c: Cluster) -> None:
        body: dict[str, Any] = {
            "model": "tiny", "prompt": TEXT, "best_of": 1, "max_tokens": COUNT, "stream": True,
            "temperature": 0.0, "ignore_eos": True,
        }  # fmt: skip
        chunks = list(objects(await data_of(c, "/v1/completions", body)))
        assert "".join(data["choices"][0]["text"] for data in chunks) == c.text(
            COUNT, c.codec.encode_now(TEXT)
        )
        assert all("usage" not in data for data in chunks)
        chat = {
            "model": "tiny", "messages": CHAT, "max_completion_tokens": COUNT, "stream": True,
            "temperature": 0.0, "ignore_eos": False, "min_tokens": COUNT,
        }  # fmt: skip
        texts = [
            data["choices"][0]["delta"].get("content", "")
            for data in objects(await data_of(c, "/v1/chat/completions", chat))
        ]
        assert len("".join(texts)) == COUNT
        _, whole = await c.post("/v1/chat/completions", {**chat, "stream": False})
        assert whole["choices"][0]["message"]["content"] == "".join(texts)
        assert whole["usage"]["completion_tokens"] == COUNT
        assert (await c.get("/get_server_info"))[0] == 200
        assert (await c.post("/flush_cache", {}))[0] == 200

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- guidellm


def test_guidellm(model_folder: Path) -> None:
    """It looks at /health and the models first, and at the usage of every chunk."""

    async def scenario(c: Cluster) -> None:
        assert (await c.get("/health"))[0] == 200
        assert (await c.get("/v1/models"))[1]["data"][0]["id"] == "tiny"
        shared = {
            "model": "tiny", "stream": True, "stop": None, "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        parts = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
        for path, body in (
            ("/v1/completions", {"prompt": TEXT, "max_tokens": COUNT}),
            ("/v1/chat/completions", {"messages": parts, "max_completion_tokens": COUNT}),
        ):
            text, usage = "", None
            for chunk in objects(await data_of(c, path, shared | body)):
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or ():
                    text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            assert usage is not None
            assert (len(text), usage["completion_tokens"]) == (COUNT, COUNT)
            assert usage["prompt_tokens"] > 0

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- evalscope


def test_evalscope(model_folder: Path) -> None:
    """A test request that is not streamed, then streams; prompts as text, messages or ids."""

    async def scenario(c: Cluster) -> None:
        knobs = {
            "model": "tiny", "max_tokens": COUNT, "min_tokens": COUNT, "n": 1, "seed": 7,
            "top_k": 20, "temperature": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
            "stop_token_ids": [299],
        }  # fmt: skip
        status, answer = await c.post("/v1/chat/completions", {**knobs, "messages": CHAT})
        assert status == 200
        assert answer["usage"]["completion_tokens"] == COUNT
        stream = {**knobs, "stream": True, "stream_options": {"include_usage": True}}
        for path, prompt in (
            ("/v1/chat/completions", {"messages": CHAT}),
            ("/v1/completions", {"prompt": TEXT, "logprobs": True}),
            ("/v1/completions", {"prompt": IDS, "logprobs": False}),
        ):
            chunks = list(objects(await data_of(c, path, stream | prompt)))
            with_logprobs = any(choice.get("logprobs") for x in chunks for choice in x["choices"])
            assert with_logprobs is prompt.get("logprobs", False)
            assert {chunk["object"] for chunk in chunks} <= {
                "chat.completion.chunk",
                "text_completion",
            }
            assert chunks[-1]["usage"]["completion_tokens"] == COUNT

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- aiperf


def test_aiperf(model_folder: Path) -> None:
    """Chunks carry `object`; its headers are taken; a request that it leaves is ended on nodes."""

    async def scenario(c: Cluster) -> None:
        headers = {"Accept": "text/event-stream", "X-Correlation-ID": "c-1", "X-Request-ID": "q-1"}
        body: dict[str, Any] = {
            "messages": [{"role": "user", "name": "aiperf", "content": TEXT}], "model": "tiny",
            "stream": True, "max_completion_tokens": COUNT,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        chunks = list(objects(await data_of(c, "/v1/chat/completions", body, **headers)))
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[-1]["usage"]["completion_tokens"] == COUNT
        body = {"prompt": [TEXT], "model": "tiny", "stream": True, "max_tokens": COUNT}
        chunks = list(objects(await data_of(c, "/v1/completions", body, **headers)))
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}

        body["max_tokens"] = 400
        async with c.session.post(f"{c.url}/v1/completions", json=body, headers=headers) as left:
            await left.content.readany()
        await c.eventually(lambda: not c.nodes["p0"].rooms and not c.nodes["d1"].rooms)
        assert await c.metric('pdserve_router_requests_total{outcome="disconnected"}', 0) == 1

    in_cluster(model_folder, scenario)


# ---------------------------------------------------------------- openai-python, evaluation


def test_openai_python_echo_and_best_of(model_folder: Path) -> None:
    """Typed by the library: what it cannot parse would fail here."""

    async def scenario(c: Cluster) -> None:
        async with c.openai() as client:
            answer = await client.completions.create(
                model="tiny", prompt=IDS, max_tokens=3, echo=True, logprobs=2, n=2, best_of=3
            )
            assert len(answer.choices) == 2
            told = answer.choices[0].logprobs
            assert told is not None
            assert told.token_logprobs is not None
            assert len(told.token_logprobs) == len(IDS) + 3
            assert told.token_logprobs[:1] == [None]
            raw = await client.completions.create(
                model="tiny", prompt=IDS, max_tokens=1, extra_body={"prompt_logprobs": 1}
            )
            extra = raw.choices[0].model_dump()
            assert len(extra["prompt_logprobs"]) == len(IDS)
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(model="tiny", prompt=IDS, suffix="x")
            assert (refused.value.param, refused.value.code) == ("suffix", "unsupported")

    in_cluster(model_folder, scenario)


def test_an_evaluation_harness_scores_continuations(model_folder: Path) -> None:
    """Context and continuation in one prompt of ids, several prompts a request, one token drawn
    and left out of the score."""

    async def scenario(c: Cluster) -> None:
        prompts, context = [IDS, [*IDS[:5], 60, 61]], 5
        body = {
            "model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1,
            "seed": 1234, "echo": True,
        }  # fmt: skip
        _, answer = await c.post("/v1/completions", body)
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
            prompt = prompts[choice["index"]]
            told = choice["logprobs"]
            scores = told["token_logprobs"][context:-1]
            assert len(scores) == len(prompt) - context
            tops = told["top_logprobs"][context:-1]
            for token, top in zip(told["tokens"][context:-1], tops, strict=True):
                assert token in top
            assert told["tokens"][-1] == c.codec.decode(expected_tokens(prompt, 1))

    in_cluster(model_folder, scenario)
