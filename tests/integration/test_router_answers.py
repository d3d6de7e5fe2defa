"""What the router answers, over real sockets with stand-in nodes."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from common.messages import Abort, Generate
from tests.integration.router_rig import (
    IDS,
    Cluster,
    in_cluster,
)
from tests.standin import expected_tokens

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
