"""Calls in a model's text: found in every format, in whatever pieces the text comes."""

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tools.formats import FORMATS, ForcedJson, Hermes, Llama3Json, Mistral
from router.tools.json_scan import MAX_DEPTH
from router.tools.parser import CallParser

NAMES = ("get_weather", "add", "say")
PARSERS: list[type[CallParser]] = [*FORMATS.values(), ForcedJson]

Answer = tuple[str, list[tuple[str, str]]]
"""Content, and each call's name and arguments."""


def parse(kind: type[CallParser], pieces: Sequence[str], max_calls: int | None = None) -> Answer:
    ids = map(str, itertools.count())
    parser = kind(NAMES, lambda: next(ids), max_calls=max_calls)
    content = ""
    calls: list[list[str]] = []
    for parsed in (*map(parser.feed, pieces), parser.finish()):
        content += parsed.content
        for delta in parsed.calls:
            if delta.index == len(calls):
                assert delta.id == str(delta.index)
                assert delta.name is not None
                calls.append([delta.name, ""])
            else:
                assert (delta.id, delta.name) == (None, None)
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls]


def both_ways(kind: type[CallParser], text: str) -> Answer:
    """The whole at once, which single characters must agree with."""
    whole = parse(kind, [text])
    assert parse(kind, text) == whole
    return whole


# ---------------------------------------------------------------- as the model cards have it

RECORDED: list[tuple[type[CallParser], str, str, list[tuple[str, dict[str, object]]]]] = [
    (  # Hermes 2 Pro
        Hermes,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "",
        [("get_weather", {"city": "Oslo"})],
    ),
    (  # Hermes 3 writes the arguments first
        Hermes,
        '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "get_weather"}\n</tool_call>\n',
        "",
        [("get_weather", {"city": "Oslo"})],
    ),
    (  # Qwen 2.5: two calls after some words
        Hermes,
        "Let me look.\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n'
        "</tool_call>\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": [1, -2.5e3], "b": null}}\n</tool_call>',
        "Let me look.",
        [("get_weather", {"city": "Oslo", "days": 2}), ("add", {"a": [1, -2500.0], "b": None})],
    ),
    (  # Qwen 3: what it thinks stays content
        Hermes,
        "<think>\nThe user wants {weather}.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>',
        "<think>\nThe user wants {weather}.\n</think>",
        [("get_weather", {})],
    ),
    (  # SmolLM2
        Hermes,
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Rome"}},\n'
        ' {"name": "add", "arguments": {"a": 1}}]</tool_call>',
        "",
        [("get_weather", {"city": "Rome"}), ("add", {"a": 1})],
    ),
    (  # no arguments, and no closing marker
        Hermes,
        '<tool_call>{"name": "get_weather"}',
        "",
        [("get_weather", {})],
    ),
    (  # arguments as a string
        Hermes,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"x\\\\ny\\"}"}</tool_call>',
        "",
        [("add", {"a": "x\ny"})],
    ),
    (  # a line end as it is
        Hermes,
        '<tool_call>{"name": "say", "arguments": {"text": "one\ntwo\t\\n"}}</tool_call>',
        "",
        [("say", {"text": "one\ntwo\t\n"})],
    ),
    (  # Llama 3.1
        Llama3Json,
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        "",
        [("get_weather", {"city": "Oslo"})],
    ),
    (
        Llama3Json,
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": "1", "b": "2"}}',
        "",
        [("add", {"a": "1", "b": "2"})],
    ),
    (
        Llama3Json,
        'I will.<|python_tag|>{"name": "add", "parameters": {"a": 1}}; '
        '{"name": "say", "parameters": {"text": "}"}}\n{"name": "add", "parameters": {}}',
        "I will.",
        [("add", {"a": 1}), ("say", {"text": "}"}), ("add", {})],
    ),
    (  # Mistral 7B v0.3
        Mistral,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "format": "c"}}]',
        "",
        [("get_weather", {"city": "Paris", "format": "c"})],
    ),
    (  # Mistral Small 3.1 and later
        Mistral,
        'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]add[ARGS]{"a": 1}',
        "Sure.",
        [("get_weather", {"city": "Paris"}), ("add", {"a": 1})],
    ),
    (
        Mistral,
        '[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1}[TOOL_CALLS]say{"text": "hi"}',
        "",
        [("add", {"a": 1}), ("say", {"text": "hi"})],
    ),
    (
        ForcedJson,
        '[{"name": "add", "arguments": {"a": 1}}, {"name": "say", "arguments": {"text": "é"}}]',
        "",
        [("add", {"a": 1}), ("say", {"text": "é"})],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "content", "calls"), RECORDED)
def test_recorded_calls_are_found(
    kind: type[CallParser], text: str, content: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    found_content, found = both_ways(kind, text)
    assert found_content == content
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


# ---------------------------------------------------------------- what is no call

NO_CALLS = [
    (Hermes, "plain text with <tool> and </tool_call>"),
    (Hermes, "<tool_call>not JSON</tool_call>"),
    (Hermes, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (Hermes, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (Hermes, '<tool_call>{"name": "add", "arguments": 5}</tool_call>'),
    (Hermes, '<tool_call>{"name": "add", "arguments": "five"}</tool_call>'),
    (Hermes, '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    (Hermes, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    (Hermes, "<tool_call>[]</tool_call>"),
    (Hermes, "<tool_call>[1, 2]</tool_call>"),
    (Hermes, "<tool_call>{}</tool_call>"),
    (Hermes, "<tool_call>{'name': 'add'}</tool_call>"),
    (Hermes, '<tool_call>\n{"name": "ad'),
    (Hermes, "  <tool_ca"),
    (Hermes, " \n"),
    (Llama3Json, "text, then JSON: {}"),
    (Llama3Json, '{"name": "Alice", "parameters": {"age": 5}}'),
    (Llama3Json, '{"name": "add"}'),
    (Llama3Json, '{"city": "Oslo"}'),
    (Llama3Json, "[1] says so"),
    (Llama3Json, '<|python_tag|>brave_search.call(query="x")'),
    (Llama3Json, " { "),
    (Mistral, "[TOOL_CALLS] nothing of the kind!"),
    (Mistral, "[TOOL_CALLS]unknown[ARGS]{}"),
    (Mistral, "[TOOL_CALLS]" + "a" * 400),
    (Mistral, "[1, 2] [TOOL_"),
    (ForcedJson, '[{"name": "add"'),
]


@pytest.mark.parametrize(("kind", "text"), NO_CALLS)
def test_what_is_no_call_is_content_markup_and_all(kind: type[CallParser], text: str) -> None:
    assert both_ways(kind, text) == (text, [])


def test_a_call_that_is_cut_off_stays_as_far_as_it_came() -> None:
    text = 'Look:\n<tool_call>{"name": "say", "arguments": {"text": "Hel'
    assert both_ways(Hermes, text) == ("Look:", [("say", '{"text": "Hel')])


def test_a_call_that_breaks_keeps_its_name_and_the_rest_is_content() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>'
    assert both_ways(Hermes, text) == ("oops}}</tool_call>", [("add", '{"a": ')])


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ('{"a": 1}, "parameters": {}}', '{"a": 1}'),
        ('{"a": 1.}}', '{"a": 1.'),
        ('{"a": 01}}', '{"a": 01'),
        ('{"a": +1}}', '{"a": '),
        ('{"a": trux}}', '{"a": tru'),
        ('{"a": "\\x"}}', '{"a": "\\'),
        ('{"a": "\\u12g"}}', '{"a": "\\u12'),
        ('{"a" 1}}', '{"a" '),
        ('{"a": 1,}}', '{"a": 1,'),
        ('{"a": [1}}', '{"a": [1'),
    ],
)
def test_what_is_no_json_ends_the_call(arguments: str, reported: str) -> None:
    content, calls = both_ways(Hermes, f'<tool_call>{{"name": "add", "arguments": {arguments}')
    assert calls == [("add", reported)]
    assert content
    assert arguments.endswith(content)


def test_keys_may_be_written_with_escapes() -> None:
    text = '<tool_call>{"\\u006eame": "\\u0061dd", "argument\\u0073": {"a": 1}}</tool_call>'
    assert both_ways(Hermes, text) == ("", [("add", '{"a": 1}')])


def test_a_broken_call_does_not_hide_the_next_one() -> None:
    text = '<tool_call>{"name": }</tool_call>\n<tool_call>{"name": "add"}</tool_call>'
    assert both_ways(Hermes, text) == ('<tool_call>{"name": }</tool_call>', [("add", "{}")])


def test_nothing_counts_after_as_many_calls_as_were_wanted() -> None:
    text = '<tool_call>{"name": "add"}</tool_call> and <tool_call>{"name": "say"}</tool_call>'
    assert parse(Hermes, text, max_calls=1) == ("", [("add", "{}")])
    parser = Hermes(NAMES, str, max_calls=1)
    parser.feed('<tool_call>{"name": "add"')
    assert not parser.satisfied
    parser.feed("}")
    assert parser.satisfied


def test_content_and_arguments_come_as_soon_as_they_are_certain() -> None:
    parser = Hermes(NAMES, lambda: "id")
    assert parser.feed("Let me <").content == "Let me"
    assert parser.feed("look. ").content == " <look."
    assert not parser.feed('<tool_call>{"name": "say", "argu').calls
    (begun,) = parser.feed('ments": {"text": "a').calls
    assert (begun.id, begun.name, begun.arguments) == ("id", "say", '{"text": "a')
    (more,) = parser.feed("bc").calls
    assert (more.id, more.name, more.arguments) == (None, None, "bc")
    assert parser.finish().content == ""


# ---------------------------------------------------------------- properties

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)  # fmt: skip
_ARGUMENTS = st.dictionaries(st.text(max_size=6), _JSON, max_size=3)
_CALLS = st.lists(st.tuples(st.sampled_from(NAMES), _ARGUMENTS), min_size=1, max_size=3)
_SPACE = st.sampled_from(["", " ", "\n", "\n\n  "])

MARKUP = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", ";", "[", "]", "{",
    "}", '"', ",", ":", "\\", '"name"', '"arguments"', '"parameters"', '"add"', "add", "say",
    '{"name": "add", "arguments": {', '{"a": 1}', "null", "-1.5e", " ", "\n", "text", "é", "\x07",
    "<tool", "_call>", '"{\\"a\\": 1}"', "\\u00", "tru", "e",
]  # fmt: skip
_SCRAPS = st.lists(st.sampled_from(MARKUP) | st.text(max_size=3), max_size=24).map("".join)


def _cut(text: str, at: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@pytest.mark.parametrize("kind", PARSERS)
@given(text=_SCRAPS, at=st.lists(st.integers(0, 200), max_size=8))
@settings(deadline=None, max_examples=400)
def test_any_pieces_of_any_text_come_to_the_same(
    kind: type[CallParser], text: str, at: list[int]
) -> None:
    whole = parse(kind, [text])
    assert parse(kind, _cut(text, at)) == whole
    assert parse(kind, text) == whole
    if not whole[1]:
        assert whole[0] == text


@given(calls=_CALLS, space=_SPACE, at=st.lists(st.integers(0, 400), max_size=5), indent=_SPACE)
@settings(deadline=None, max_examples=200)
def test_calls_that_are_written_are_the_calls_that_are_read(
    calls: list[tuple[str, dict[str, object]]], space: str, at: list[int], indent: str
) -> None:
    written: list[dict[type[CallParser], str]] = [
        {
            Hermes: space.join(
                f"<tool_call>{space}{_object(call, 'arguments')}{space}</tool_call>"
                for call in calls
            ),
            Llama3Json: ";".join(space + _object(call, "parameters") for call in calls),
            Mistral: f"[TOOL_CALLS]{space}[{','.join(_object(c, 'arguments') for c in calls)}]",
            ForcedJson: json.dumps([json.loads(_object(c, "arguments")) for c in calls], indent=2),
        },
        {
            Hermes: f"<tool_call>[{','.join(_object(c, 'arguments') for c in calls)}]",
            Mistral: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}{space}" for n, a in calls),
        },
    ]
    for kind, text in (pair for way in written for pair in way.items()):
        content, found = parse(kind, _cut(text, at))
        assert content == ""
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def _object(call: tuple[str, dict[str, object]], key: str) -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


@given(text=_SCRAPS, value=_JSON)
@settings(deadline=None, max_examples=300)
def test_arguments_of_a_whole_call_are_always_json(text: str, value: object) -> None:
    body = f'<tool_call>{{"name": "add", "arguments": {{"v": {json.dumps(value)}, {text}'
    parser = Hermes(NAMES, str, max_calls=1)
    parsed = parser.feed(body)
    if parser.satisfied:
        json.loads("".join(delta.arguments for delta in parsed.calls))


def test_deep_nesting_and_long_words_are_content_in_time() -> None:
    deep = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 100_000
    content, calls = parse(Hermes, [deep])
    assert calls == [("add", '{"a": ' + "[" * (MAX_DEPTH - 2))]
    assert len(content) + len(calls[0][1]) == 100_000 + len('{"a": ')
    long = '<tool_call>{"' + "n" * 100_000
    assert parse(Hermes, [long]) == (long, [])
