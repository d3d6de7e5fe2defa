"""What a request may say of functions, and what becomes of it."""

import json
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from router.errors import ApiError
from router.protocol.body import decode_body
from router.protocol.requests import ChatRequest
from router.protocol.tools import Function, Tool
from router.tools.detect import detect_format
from router.tools.forced import calls_grammar
from router.tools.formats import ForcedJson, FormatName, Hermes, Llama3Json
from router.tools.wish import ToolDesk, ToolWish

CHAT = msgspec.json.Decoder(ChatRequest)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"$ref": "#/$defs/number"}},
            "required": ["a"],
            "$defs": {"number": {"type": "integer"}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def wish(name: FormatName = "hermes", **body: Any) -> ToolWish:
    raw = json.dumps({"messages": [], **body}).encode()
    request = decode_body(CHAT, raw)
    desk = ToolDesk(name, {"[TOOL_CALLS]": 7}.get, lambda: "0123456789abcdef" * 2)
    parallel = request.parallel_tool_calls is not False
    answer = request.grammar_wish()
    return desk.wish(request.tools, request.tool_choice, parallel=parallel, answer=answer)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": "add"}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]},
            "tools[0].function.description",
        ),
        (
            {"tools": [NOW, {"type": "function", "function": {"name": "two words"}}]},
            "tools[1].function.name",
        ),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": [NOW] * 513}, "tools"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0].function.parameters",
        ),
        ({"tools": [NOW], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": 5}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {}}, "tool_choice.type"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [NOW], "tool_choice": named("add")}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("add")}, "tool_choice.function.name"),
        ({"tools": [NOW], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_wrong_shapes_are_400_naming_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        wish(**body)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_parameters_nested_beyond_reason_are_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(100_000):
        schema = {"type": "object", "not": schema}
    with pytest.raises(ApiError) as refused:
        calls_grammar([Tool("function", Function("f", None, schema))], "arguments", many=True)
    assert (refused.value.status, refused.value.param) == (400, "tools")


def test_nothing_is_parsed_without_tools_or_when_none_is_chosen() -> None:
    assert wish() == ToolWish()
    assert wish(tools=[]) == ToolWish()
    assert wish(tools=None, tool_choice="auto") == ToolWish()
    assert wish(tools=[ADD], tool_choice="none") == ToolWish()


def test_auto_gives_the_template_the_tools_and_parses_the_models_format() -> None:
    found = wish("llama3_json", tools=[ADD, NOW])
    assert found.tools[0] == ADD
    assert found.tools[1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert found.grammar is None
    assert found.calls is not None
    assert found.calls.parser is Llama3Json
    assert (found.calls.names, found.calls.max_calls) == (frozenset({"add", "now"}), None)
    single = wish(tools=[ADD], tool_choice="auto", parallel_tool_calls=False)
    assert single.calls is not None
    assert (single.calls.parser, single.calls.max_calls) == (Hermes, 1)


def test_ids_and_markers_are_the_formats_own() -> None:
    mistral = wish("mistral", tools=[NOW]).calls
    assert mistral is not None
    assert (mistral.make_id(), mistral.markers) == ("012345678", {7: "[TOOL_CALLS]"})
    hermes = wish("hermes", tools=[NOW]).calls
    assert hermes is not None
    assert (hermes.make_id(), hermes.markers) == ("call_0123456789abcdef01234567", {})


def judge(found: ToolWish) -> Draft202012Validator:
    assert found.grammar is not None
    schema = json.loads(found.grammar.grammar.text)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_required_is_a_grammar_of_one_or_more_calls() -> None:
    found = wish("llama3_json", tools=[ADD, NOW], tool_choice="required")
    assert found.calls is not None
    assert found.calls.parser is ForcedJson
    valid = judge(found).is_valid
    assert valid([{"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}])
    assert not valid([])
    assert not valid([{"name": "add", "parameters": {"a": "1"}}])
    assert not valid([{"name": "add", "parameters": {"b": 1}}])
    assert not valid([{"name": "other", "parameters": {}}])
    assert not valid([{"name": "now", "parameters": []}])
    assert not valid([{"name": "now"}])
    assert found.grammar is not None
    call = json.loads(found.grammar.grammar.text)["items"]["anyOf"][0]
    assert list(call["properties"]) == ["name", "parameters"]  # in which order they are written


def test_a_named_function_is_a_grammar_of_one_call_of_it() -> None:
    found = wish(tools=[ADD, NOW], tool_choice=named("add"))
    assert found.calls is not None
    assert (found.calls.by_name, found.calls.max_calls) == (True, 1)
    assert found.calls.names == {"add"}
    assert len(found.tools) == 2
    valid = judge(found).is_valid
    assert valid({"name": "add", "arguments": {"a": 1, "b": 2}})
    assert not valid({"name": "now", "arguments": {}})
    assert not valid({"name": "add", "arguments": {"a": 1, "b": "2"}})


def test_references_in_data_are_not_touched() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "$ref": {"const": {"$ref": "#/x"}},
            "node": {"$ref": "#"},
            "other": {"enum": [{"$ref": "#"}]},
            "default": {"$ref": "#/$defs/enum"},
        },
        "$defs": {"enum": {"type": "integer"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    valid = judge(wish(tools=[tool], tool_choice=named("f"))).is_valid
    arguments = {"$ref": {"$ref": "#/x"}, "node": {"node": {}}, "other": {"$ref": "#"}}
    assert valid({"name": "f", "arguments": arguments})
    assert not valid({"name": "f", "arguments": {"node": {"node": 5}}})
    assert valid({"name": "f", "arguments": {"default": 5}})
    assert not valid({"name": "f", "arguments": {"default": "5"}})


ANSWER = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"sum": {"$ref": "#/$defs/n"}},
            "required": ["sum"],
            "$defs": {"n": {"type": "integer"}},
        },
    },
}


def test_an_answers_schema_leaves_room_for_calls() -> None:
    found = wish(tools=[ADD, NOW], response_format=ANSWER)
    assert found.grammar is not None
    assert found.grammar.field == "response_format.json_schema.schema"
    assert found.calls is not None
    assert (found.calls.parser, found.calls.max_calls) == (ForcedJson, None)
    valid = judge(found).is_valid
    call = {"name": "add", "arguments": {"a": 1}}
    assert valid({"sum": 5})
    assert valid(call)
    assert valid([call, {"name": "now", "arguments": {}}])
    assert not valid({"sum": "5"})
    assert not valid({"name": "add", "arguments": {}})
    assert not valid([])
    assert not valid([{"sum": 5}])
    single = judge(wish(tools=[ADD], response_format=ANSWER, parallel_tool_calls=False)).is_valid
    assert single(call)
    assert not single([call])
    anything = judge(wish(tools=[ADD], response_format={"type": "json_object"})).is_valid
    assert anything({"b": []})
    assert anything([call])


def test_calls_that_must_be_made_leave_no_room_for_an_answer() -> None:
    valid = judge(wish(tools=[ADD], tool_choice="required", response_format=ANSWER)).is_valid
    assert valid([{"name": "add", "arguments": {"a": 1}}])
    assert not valid({"sum": 5})
    without = wish(tools=[ADD], tool_choice="none", response_format=ANSWER)
    assert (without.tools, without.calls) == ((), None)
    assert not judge(without).is_valid([{"name": "add", "arguments": {"a": 1}}])


def test_other_grammars_and_tools_that_may_be_called_exclude_each_other() -> None:
    with pytest.raises(ApiError) as refused:
        wish(tools=[ADD], guided_regex="a+")
    assert (refused.value.status, refused.value.param) == (400, "guided_regex")


@pytest.mark.parametrize(
    ("template", "model_type", "tokens", "expected"),
    [
        ("{{ tools }} <tool_call>", "qwen3", "", "hermes"),
        ('{{ "[TOOL_CALLS]" }} {{ tools }}', "mistral", "", "mistral"),
        ('{"name": .., "parameters": ..} {{ tools }}', "llama", "", "llama3_json"),
        ("{{ messages }}", "llama", "<|python_tag|>", "hermes"),
        ("", "mistral", "[TOOL_CALLS]", "mistral"),
        ("", "llama", "<|python_tag|>", "llama3_json"),
        ("", "llama", "", "hermes"),
    ],
)
def test_the_format_is_read_off_the_model(
    template: str, model_type: str, tokens: str, expected: str
) -> None:
    assert detect_format(template, model_type, lambda token: token == tokens) == expected
