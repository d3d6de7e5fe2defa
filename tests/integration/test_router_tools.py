"""Functions over the chat API: stand-in nodes write what a model might, openai-python reads it."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from common.messages import Abort, Generate
from tests.integration.router_rig import Cluster, in_cluster, make_folder

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
USER: ChatCompletionMessageParam = {"role": "user", "content": "weather?"}
ROOMY = {"step_s": 0.001, "max_model_len": 4096, "num_pages": 1024}
END = 2


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose prompts have room for functions, a character being a token."""
    folder = make_folder(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return folder


def script(c: Cluster, text: str, *more: int) -> None:
    """What the nodes draw from now on, whatever they are asked."""
    ids = c.codec.encode_now(text)
    for node in c.nodes.values():
        node.script = [*ids, *more, END]


async def streamed(c: Cluster, body: dict[str, Any]) -> list[Any]:
    """The only choice of each chunk."""
    lines = await c.lines("/v1/chat/completions", {**body, "stream": True})
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line[6:])["choices"][0] for line in lines[:-3] if line]


def joined(chunks: list[Any]) -> tuple[str, list[dict[str, str]]]:
    """Content and calls as a client puts them together."""
    content = ""
    calls: list[dict[str, str]] = []
    for delta in (chunk["delta"] for chunk in chunks):
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["type"] == "function"
                calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return content, calls


def test_openai_python_makes_a_round_trip(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        script(c, f"I look.\n{CALL % 'Oslo'}\n{CALL % 'Rome'}")
        async with c.openai() as client:
            messages: list[ChatCompletionMessageParam] = [USER]
            answer = await client.chat.completions.create(
                model="tiny", messages=messages, tools=[WEATHER], tool_choice="auto"
            )
            (choice,) = answer.choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
            calls = choice.message.tool_calls or []
            assert len({call.id for call in calls}) == 2
            arguments = []
            for call in calls:
                assert call.type == "function"
                assert call.function.name == "get_weather"
                arguments.append(json.loads(call.function.arguments))
            assert arguments == [{"city": "Oslo"}, {"city": "Rome"}]
            messages.append(choice.message.model_dump(exclude_none=True))  # type: ignore[arg-type]
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "cold"} for call in calls
            ]
            script(c, "Cold.")
            answer = await client.chat.completions.create(
                model="tiny", messages=messages, tools=[WEATHER]
            )
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].message.content == "Cold."
            assert answer.choices[0].message.tool_calls is None
        generate = c.nodes["p0"].got(Generate)[-1]
        assert isinstance(generate, Generate)
        prompt = c.codec.decode(generate.prompt_ids)
        assert '<tool_call>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, ' in prompt
        assert prompt.count("<tool_response>\ncold\n</tool_response>") == 2
        assert "The weather of a city" in prompt

    in_cluster(long_folder, scenario, node_settings=ROOMY)


def test_openai_python_reads_a_stream_of_calls(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        script(c, f"I look.\n{CALL % 'Oslo'}{CALL % 'Rome'}")
        async with c.openai() as client:
            names: list[str | None] = []
            arguments = ["", ""]
            content = ""
            pieces = 0
            stream = await client.chat.completions.create(
                model="tiny", messages=[USER], tools=[WEATHER], stream=True
            )
            async for chunk in stream:
                (choice,) = chunk.choices
                content += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    assert call.function is not None
                    if call.id:
                        names.append(call.function.name)
                    arguments[call.index] += call.function.arguments or ""
                    pieces += 1
            assert (content, names) == ("I look.", ["get_weather"] * 2)
            assert [json.loads(text) for text in arguments] == [{"city": "Oslo"}, {"city": "Rome"}]
            assert pieces > 10
            assert choice.finish_reason == "tool_calls"

    in_cluster(long_folder, scenario, node_settings=ROOMY)


TEXTS = [
    (f"I look.\n{CALL % 'Oslo'}\n{CALL % 'Rome'}\n", 2, "tool_calls"),
    (f"  {CALL % 'Oslo'}", 1, "tool_calls"),
    ("<tool_call>broken</tool_call>", 0, "stop"),
    ('cut off <tool_call>{"name": "get_weather", "arguments": {"ci', 1, "stop"),
    ("no call at all", 0, "stop"),
    (f"{CALL % 'Oslo'} and then words", 1, "tool_calls"),
]


@pytest.mark.parametrize(("text", "num_calls", "finish"), TEXTS)
def test_a_stream_says_what_the_whole_answer_says(
    long_folder: Path, text: str, num_calls: int, finish: str
) -> None:
    async def scenario(c: Cluster) -> None:
        script(c, text)
        body = {"messages": [USER], "tools": [WEATHER]}
        chunks = await streamed(c, body)
        status, answer = await c.post("/v1/chat/completions", body)
        assert status == 200
        (choice,) = answer["choices"]
        content, calls = joined(chunks)
        assert content == (choice["message"]["content"] or "")
        whole = [call["function"] for call in choice["message"].get("tool_calls", ())]
        assert [(call["name"], call["arguments"]) for call in calls] == [
            (call["name"], call["arguments"]) for call in whole
        ]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        assert choice["finish_reason"] == finish
        assert len(calls) == num_calls
        assert chunks[0]["delta"]["role"] == "assistant"
        assert "content" in chunks[0]["delta"]
        assert all("role" not in chunk["delta"] for chunk in chunks[1:])
        if not calls:
            assert content == text

    in_cluster(long_folder, scenario, node_settings=ROOMY)


def test_only_what_was_given_is_called_and_only_when_it_may_be(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        text = CALL % "Oslo"
        script(c, text)
        other = {"type": "function", "function": {"name": "other"}}
        for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [other]}):
            _, answer = await c.post("/v1/chat/completions", {"messages": [USER], **body})
            message = answer["choices"][0]["message"]
            assert message == {"role": "assistant", "content": text}, body
            assert answer["choices"][0]["finish_reason"] == "stop"

    in_cluster(long_folder, scenario, node_settings=ROOMY)


def test_limits_stops_and_several_choices(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        text = CALL % "Oslo"
        script(c, f"{text} END")
        body: dict[str, Any] = {"messages": [USER], "tools": [WEATHER]}
        cut = len(c.codec.encode_now(text[: text.index("slo")]))
        _, answer = await c.post("/v1/chat/completions", {**body, "max_tokens": cut})
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "O'
        _, answer = await c.post("/v1/chat/completions", {**body, "n": 2, "stop": ["END"]})
        ids = set()
        for choice in answer["choices"]:
            assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "END")
            (call,) = choice["message"]["tool_calls"]
            assert choice["message"]["content"] is None
            ids.add(call["id"])
        assert len(ids) == 2

    in_cluster(long_folder, scenario, node_settings=ROOMY)


def test_the_answer_ends_with_its_only_call(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        script(c, f"{CALL % 'Oslo'}{CALL % 'Rome'}" * 3)
        body = {"messages": [USER], "tools": [WEATHER], "parallel_tool_calls": False}
        _, answer = await c.post("/v1/chat/completions", body)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert len(choice["message"]["tool_calls"]) == 1
        await c.eventually(lambda: c.nodes["d1"].got(Abort) and not c.nodes["d1"].rooms)
        _, calls = joined(await streamed(c, body))
        assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Oslo"}]

    in_cluster(long_folder, scenario, node_settings=ROOMY)


REQUIRED = [{"name": "get_weather", "arguments": {"city": c}} for c in ("Oslo", "Rome")]
BY_NAME = {"type": "function", "function": {"name": "get_weather"}}


def held_to(c: Cluster) -> dict[str, Any]:
    """The JSON schema of the last request."""
    generate = c.nodes["d1"].got(Generate)[-1]
    assert isinstance(generate, Generate)
    assert generate.sampling.grammar is not None
    schema: dict[str, Any] = json.loads(generate.sampling.grammar.text)
    return schema


def test_calls_that_must_be_made_come_from_a_grammar(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        script(c, json.dumps(REQUIRED, indent=1))
        body = {"messages": [USER], "tools": [WEATHER], "tool_choice": "required", "n": 2}
        _, answer = await c.post("/v1/chat/completions", body)
        assert len(answer["choices"]) == 2
        for choice in answer["choices"]:
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            calls = [call["function"] for call in choice["message"]["tool_calls"]]
            assert [json.loads(call["arguments"]) for call in calls] == [
                call["arguments"] for call in REQUIRED
            ]
        assert held_to(c)["items"]["properties"]["name"] == {"const": "get_weather"}
        content, streamed_calls = joined(await streamed(c, {**body, "n": 1}))
        assert (content, len(streamed_calls)) == ("", 2)
        whole = json.dumps(REQUIRED, indent=1)
        cut = len(c.codec.encode_now(whole[: whole.index("ome")]))
        chunks = await streamed(c, {**body, "n": 1, "max_tokens": cut})
        content, streamed_calls = joined(chunks)
        assert (content, chunks[-1]["finish_reason"]) == ("", "length")
        assert streamed_calls[1]["arguments"].endswith('"R')

    in_cluster(long_folder, scenario, node_settings=ROOMY)


def test_a_named_function_is_called_once(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        script(c, json.dumps(REQUIRED[0]))
        body = {"messages": [USER], "tools": [WEATHER], "tool_choice": BY_NAME}
        _, answer = await c.post("/v1/chat/completions", body)
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", None)
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        assert held_to(c)["type"] == "object"
        chunks = await streamed(c, body)
        assert joined(chunks)[1][0]["arguments"] == '{"city": "Oslo"}'
        assert chunks[-1]["finish_reason"] == "stop"

    in_cluster(long_folder, scenario, node_settings=ROOMY)


def test_an_answer_in_json_and_calls_go_together(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        schema = {"type": "object", "properties": {"mild": {"type": "boolean"}}}
        response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = {"messages": [USER], "tools": [WEATHER], "response_format": response_format}
        script(c, '{"mild": true}')
        _, answer = await c.post("/v1/chat/completions", body)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": '{"mild": true}'}
        assert len(held_to(c)["anyOf"]) == 3
        script(c, json.dumps(REQUIRED[0]))
        _, answer = await c.post("/v1/chat/completions", body)
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
        assert answer["choices"][0]["finish_reason"] == "tool_calls"

    in_cluster(long_folder, scenario, node_settings=ROOMY)


def test_parameters_that_no_grammar_can_follow_are_400(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        parameters = {"type": "object", "properties": {"a": {"$ref": "https://example.org/a"}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        body = {"messages": [USER], "tools": [tool], "tool_choice": "required"}
        status, answer = await c.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert not c.nodes["p0"].got(Generate)

    in_cluster(long_folder, scenario, node_settings=ROOMY)


def test_logprobs_of_markup_come_with_what_it_became(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        script(c, f"I look.\n{CALL % 'Oslo'}")
        body = {"messages": [USER], "tools": [WEATHER], "logprobs": True}
        chunks = await streamed(c, body)
        _, answer = await c.post("/v1/chat/completions", body)
        whole = answer["choices"][0]["logprobs"]["content"]
        assert len(whole) == answer["usage"]["completion_tokens"]
        pieces = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
        assert [entry for piece in pieces for entry in piece] == whole

    in_cluster(long_folder, scenario, node_settings=ROOMY)


def test_wrong_shapes_reach_no_node(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        async with c.openai() as client:
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(
                    model="tiny",
                    messages=[USER],
                    tools=[{"type": "function"}],  # type: ignore[list-item]
                )
            assert bad.value.param == "tools[0].function"
        body = {"messages": [USER], "functions": [{"name": "f"}]}
        status, answer = await c.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "functions")
        assert "tools" in answer["error"]["message"]
        assert not c.nodes["p0"].got(Generate)

    in_cluster(long_folder, scenario, node_settings=ROOMY)


def test_tokenize_counts_the_functions_too(long_folder: Path) -> None:
    async def scenario(c: Cluster) -> None:
        _, without = await c.post("/tokenize", {"messages": [USER]})
        _, with_tools = await c.post("/tokenize", {"messages": [USER], "tools": [WEATHER]})
        assert with_tools["count"] > without["count"] + 50

    in_cluster(long_folder, scenario, node_settings=ROOMY)
