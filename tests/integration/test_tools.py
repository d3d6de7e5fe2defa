"""Functions with real nodes: grammars make the calls, templates carry them back."""

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from common.config import DEFAULT_MODEL
from deploy.default_model import cache_root
from tests.cluster_fixture import Cluster, cluster
from tests.tiny_models import make_tiny_model

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "unit": {"enum": ["celsius", "kelvin"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 12}},
}
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"const": True}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "add": ADD}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
USER: ChatCompletionMessageParam = {"role": "user", "content": "What is the weather in Paris?"}


def client_of(running: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def check(name: str, arguments: str) -> None:
    Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))


def test_a_model_that_knows_nothing_calls_as_it_must(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "tiny", seed=3, max_position_embeddings=2048)
    with cluster(folder, num_pages=512) as running, client_of(running) as client:
        wish: dict[str, Any] = {"model": "tiny", "messages": [USER], "tools": TOOLS}
        wish |= {"temperature": 1.0, "max_tokens": 300, "parallel_tool_calls": False}
        for seed in range(3):
            answer = client.chat.completions.create(**wish, tool_choice="required", n=3, seed=seed)
            for choice in answer.choices:
                assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
                [call] = choice.message.tool_calls or []
                assert call.type == "function"
                check(call.function.name, call.function.arguments)
        named: Any = {"type": "function", "function": {"name": "add"}}
        names: dict[int, str] = {}
        arguments: defaultdict[int, str] = defaultdict(str)
        for chunk in client.chat.completions.create(**wish, tool_choice=named, n=3, stream=True):
            for choice in chunk.choices:
                assert not choice.delta.content
                for part in choice.delta.tool_calls or ():
                    assert part.function is not None
                    if part.id is not None:
                        names[choice.index] = part.function.name or ""
                    arguments[choice.index] += part.function.arguments or ""
        assert names == dict.fromkeys(range(3), "add")
        for index, text in arguments.items():
            check(names[index], text)
        running.wait_until_idle()


@pytest.mark.model
def test_the_default_model_makes_a_round_trip() -> None:
    folder = cache_root() / "models" / DEFAULT_MODEL
    if not folder.is_dir():
        pytest.skip("the default model has not been fetched")
    with cluster(folder, num_pages=256, dtype="bfloat16") as running, client_of(running) as client:
        wish: dict[str, Any] = {"model": DEFAULT_MODEL, "tools": TOOLS, "temperature": 0.0}
        messages: list[ChatCompletionMessageParam] = [USER]
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        answer = client.chat.completions.create(
            **wish, messages=messages, tool_choice=named, max_tokens=100
        )
        message = answer.choices[0].message
        [call] = message.tool_calls or []
        assert call.type == "function"
        check("get_weather", call.function.arguments)
        assert "paris" in json.loads(call.function.arguments)["city"].lower()
        messages.append(message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "12 degrees, sunny"})
        chunks = client.chat.completions.create(
            **wish, messages=messages, tool_choice="auto", max_tokens=16, stream=True
        )
        choices = list(itertools.chain.from_iterable(chunk.choices for chunk in chunks))
        assert choices[0].delta.role == "assistant"
        assert choices[-1].finish_reason in ("stop", "length", "tool_calls")
        said = "".join(choice.delta.content or "" for choice in choices)
        assert said or any(choice.delta.tool_calls for choice in choices)
