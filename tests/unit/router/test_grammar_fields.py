"""Structured output in every API's words: what becomes of it, and which field a 400 names."""

from pathlib import Path
from typing import Any

import pytest

from common.messages import Grammar, GrammarKind
from router.errors import ApiError
from router.prepare import Preparer
from tests.unit.router.test_validation import chat, completion, generate, make_preparer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
JSON = Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)
ANY = Grammar(GrammarKind.JSON_SCHEMA, "{}")
REGEX = Grammar(GrammarKind.REGEX, "[ab]+c")
CHOICE = Grammar(GrammarKind.CHOICE, '["yes","no \\"x\\""]')
LARK = Grammar(GrammarKind.EBNF, 'start: "a" start?')


@pytest.fixture(scope="module")
def preparer(tiny_folder: Path) -> Preparer:
    return make_preparer(tiny_folder, num_pages=64)


def formatted(kind: str, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **more}}


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        (formatted("json_object"), ANY),
        (formatted("json_object", schema=SCHEMA), JSON),
        (formatted("json_schema", json_schema={"name": "x", "schema": SCHEMA}), JSON),
        (formatted("json_schema", json_schema={"schema": SCHEMA, "strict": True}), JSON),
        ({"guided_json": SCHEMA}, JSON),
        ({"guided_json": SCHEMA_TEXT}, JSON),
        ({"guided_json": {}}, ANY),
        ({"guided_regex": "[ab]+c"}, REGEX),
        ({"guided_choice": ["yes", 'no "x"']}, CHOICE),
        ({"guided_grammar": 'start: "a" start?'}, LARK),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json_object": True}}, ANY),
        ({"structured_outputs": {"regex": "[ab]+c", "json_object": False}}, REGEX),
        ({"structured_outputs": {"choice": ["yes", 'no "x"']}}, CHOICE),
        ({"structured_outputs": {"grammar": 'start: "a" start?'}}, LARK),
        (formatted("text"), None),
        ({"response_format": {}}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": {}}, None),
    ],
)
def test_every_spelling_becomes_one_grammar(
    preparer: Preparer, body: dict[str, Any], grammar: Grammar | None
) -> None:
    for prepared in (completion(preparer, **body), chat(preparer, **body)):
        (choice,) = prepared.choices
        assert choice.sampling.grammar == grammar


@pytest.mark.parametrize(
    ("params", "grammar"),
    [
        ({"json_schema": SCHEMA_TEXT}, JSON),
        ({"json_schema": "$$ANY$$"}, ANY),
        ({"regex": "[ab]+c"}, REGEX),
        ({"ebnf": 'start: "a" start?'}, LARK),
        ({"json_schema": None, "regex": "", "ebnf": None}, None),
    ],
)
def test_sglang_spellings(
    preparer: Preparer, params: dict[str, Any], grammar: Grammar | None
) -> None:
    (choice,) = generate(preparer, text="hello", sampling_params=params).choices
    assert choice.sampling.grammar == grammar


def test_ebnf_becomes_lark(preparer: Preparer) -> None:
    (choice,) = completion(preparer, guided_grammar='root ::= "a" root | "b"').choices
    assert choice.sampling.grammar is not None
    assert "start" in choice.sampling.grammar.text
    assert "::=" not in choice.sampling.grammar.text


def test_lark_stays_as_it_is(preparer: Preparer) -> None:
    text = 'start[max_tokens=5]: /[ab]+/ "::"'
    (choice,) = completion(preparer, guided_grammar=text).choices
    assert choice.sampling.grammar == Grammar(GrammarKind.EBNF, text)


def test_a_grammar_ends_an_output_whatever_ignore_eos_says(preparer: Preparer) -> None:
    (choice,) = completion(preparer, guided_regex="ab", ignore_eos=True).choices
    assert choice.sampling.stop_token_ids == (2,)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (formatted("xml"), "response_format.type"),
        (formatted("structural_tag"), "response_format.type"),
        (formatted("json_schema"), "response_format.json_schema"),
        (formatted("json_schema", json_schema={"name": "x"}), "response_format.json_schema.schema"),
        (formatted("json_schema", json_schema={"schema": 3}), "response_format.json_schema.schema"),
        (formatted("json_schema", json_schema=[1]), "response_format.json_schema"),
        ({"response_format": {"type": 7}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": {"type": "thing"}}, "guided_json"),
        ({"guided_json": {"not": {"type": "string"}}}, "guided_json"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        ({"guided_json": {"$ref": "https://example.com/schema.json"}}, "guided_json"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": r"(a)\1"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_grammar": "what is this"}, "guided_grammar"),
        ({"guided_grammar": 'root ::= "a" missing'}, "guided_grammar"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"guided_regex": "a", **formatted("json_object")}, "response_format"),
    ],
)
def test_bad_grammars_are_400_naming_the_field(
    preparer: Preparer, body: dict[str, Any], param: str
) -> None:
    for ask in (completion, chat):
        with pytest.raises(ApiError) as refused:
            ask(preparer, **body)
        assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"json_schema": "{"}, "sampling_params.json_schema"),
        ({"regex": "(", "json_schema": None}, "sampling_params.regex"),
        ({"ebnf": "root ::="}, "sampling_params.ebnf"),
        ({"regex": "a", "json_schema": "{}"}, "sampling_params.regex"),
        ({"structural_tag": "x"}, "sampling_params.structural_tag"),
    ],
)
def test_bad_sglang_grammars(preparer: Preparer, params: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        generate(preparer, text="hello", sampling_params=params)
    assert (refused.value.status, refused.value.param) == (400, param)
