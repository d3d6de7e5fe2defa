"""What a grammar lets a model write, token by token."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from common.grammar.errors import GrammarError
from common.grammar.matcher import CompiledGrammar, Matcher
from common.grammar.vocabulary import Vocabulary, load_vocabulary
from common.messages import Grammar, GrammarKind
from tests.tiny_models import VOCAB_SIZE
from tests.unit.grammar.conftest import PADDED_SIZE
from tests.unit.grammar.drawing import END, Writer, regex, schema


@pytest.fixture(scope="module")
def writer(folder: Path, vocabulary: Vocabulary) -> Writer:
    return Writer(folder, vocabulary)


POINT = schema(
    {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "on": {"type": "boolean"}},
        "required": ["x", "on"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("grammar", "text", "taken"),
    [
        (regex("[ab]+c"), "abac", True),
        (regex("[ab]+c"), "aba", False),
        (regex("^ab$"), "ab", True),
        (regex("a|b"), "b", True),
        (Grammar(GrammarKind.CHOICE, '["yes", "no \\"x\\"", "yes, but"]'), 'no "x"', True),
        (Grammar(GrammarKind.CHOICE, '["yes", "no \\"x\\"", "yes, but"]'), "yes", True),
        (Grammar(GrammarKind.CHOICE, '["yes", "no \\"x\\"", "yes, but"]'), "yes, but", True),
        (Grammar(GrammarKind.CHOICE, '["line\\nbreak", "\u00e9"]'), "line\nbreak", True),
        (Grammar(GrammarKind.CHOICE, '["line\\nbreak", "\u00e9"]'), "\u00e9", True),
        (Grammar(GrammarKind.EBNF, 'start: "(" start? ")"'), "(())", True),
        (Grammar(GrammarKind.EBNF, 'start: "(" start? ")"'), "(()", False),
        (schema({}), '{"any": [1, "thing"]}', True),
        (schema({}), "[1]", False),
        (POINT, '{"x":1,"on":true}', True),
        (POINT, '{"x": 1, "on": true}', True),
        (POINT, '{\n  "x": 1,\n  "on": true\n}', True),
        (POINT, '{"x":  1,"on":true}', False),
        (POINT, '{"x":1}', False),
        (POINT, '{"x":1,"on":true,"y":0}', False),
    ],
)
def test_exactly_what_the_grammar_says(
    writer: Writer, grammar: Grammar, text: str, taken: bool
) -> None:
    assert writer.takes(grammar, text) is taken


def test_the_end_is_allowed_only_where_the_grammar_accepts(writer: Writer) -> None:
    matcher = writer.start(regex("ab?"))
    assert not matcher.allowed()[END]
    matcher.consume(*writer.ids("a"))
    assert matcher.allowed()[END]
    assert matcher.allowed().sum() > 1
    matcher.consume(*writer.ids("b"))
    assert np.flatnonzero(matcher.allowed()).tolist() == [END]


def test_padding_and_other_special_tokens_are_never_allowed(writer: Writer) -> None:
    allowed = writer.start(regex("(.|\\n)*")).allowed()
    assert allowed.shape == (PADDED_SIZE,)
    assert not allowed[VOCAB_SIZE:].any()
    assert [allowed[special] for special in (0, 1, END)] == [False, False, True]


def test_a_special_token_is_allowed_where_the_grammar_names_it(writer: Writer) -> None:
    matcher = writer.start(Grammar(GrammarKind.EBNF, 'start: <|im_start|> "a"'))
    assert np.flatnonzero(matcher.allowed()).tolist() == [1]


def test_tokens_that_do_not_obey_are_an_error(writer: Writer) -> None:
    matcher = writer.start(regex("a"))
    with pytest.raises(GrammarError):
        matcher.consume(*writer.ids("b"))
    with pytest.raises(GrammarError):
        matcher.allowed()


def test_rebuilt_from_its_output_it_stands_where_it_stood(writer: Writer) -> None:
    ids = writer.ids('{"x": -17, "on": false}')
    running = writer.start(POINT)
    for count, token_id in enumerate(ids):
        rebuilt = writer.start(POINT)
        rebuilt.consume(*ids[:count])
        assert np.array_equal(rebuilt.allowed(), running.allowed())
        running.consume(token_id)


def test_whitespace_is_bounded(writer: Writer) -> None:
    """A model that is lost cannot use its tokens up between two of JSON's."""
    matcher = writer.start(POINT)
    matcher.consume(*writer.ids('{"x":'))
    blanks = [writer.ids(blank)[0] for blank in (" ", "\n")]
    count = 0
    while matcher.allowed()[blanks].any():
        allowed = matcher.allowed()
        matcher.consume(next(blank for blank in reversed(blanks) if allowed[blank]))
        count += 1
    assert 0 < count <= 21


def test_a_grammar_that_uses_up_its_limits_is_an_error_and_not_a_stall(
    vocabulary: Vocabulary,
) -> None:
    """Compiling it and the first mask are cheap, so it passes the check."""
    matcher = CompiledGrammar(regex("(a?){1000}a{1000}"), vocabulary).start()
    token_id = int(np.flatnonzero(matcher.allowed())[-1])
    with pytest.raises(GrammarError, match="too many expressions"):
        feed(matcher, token_id, 50)


def feed(matcher: Matcher, token_id: int, count: int) -> None:
    for _ in range(count):
        matcher.allowed()
        matcher.consume(token_id)


@pytest.mark.parametrize(
    "grammar",
    [
        regex("("),
        schema({"type": "thing"}),
        schema({"not": {"type": "string"}}),
        Grammar(GrammarKind.JSON_SCHEMA, "{"),
        Grammar(GrammarKind.CHOICE, "[]"),
        Grammar(GrammarKind.CHOICE, "[1]"),
        Grammar(GrammarKind.CHOICE, "yes"),
        Grammar(GrammarKind.EBNF, "what is this"),
    ],
)
def test_what_cannot_be_compiled_says_why(vocabulary: Vocabulary, grammar: Grammar) -> None:
    with pytest.raises(GrammarError) as error:
        CompiledGrammar(grammar, vocabulary)
    assert "\n" not in str(error.value)
    assert str(error.value)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=r"tokenizer\.json"):
        load_vocabulary(tmp_path, 10)


# ---------------------------------------------------------------- random schemas

_NAMES = st.text("abcxyz_-", min_size=1, max_size=6)
_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.fixed_dictionaries(
        {
            "type": st.just("integer"),
            "minimum": st.integers(-500, 0),
            "maximum": st.integers(1, 999),
        }
    ),
    st.fixed_dictionaries(
        {"type": st.just("string"), "minLength": st.integers(0, 2), "maxLength": st.integers(2, 9)}
    ),
    st.just({"type": "string", "pattern": "^[a-f]{1,4}-[0-9]+$"}),
    st.just({"type": "string", "format": "date"}),
    st.fixed_dictionaries(
        {"enum": st.lists(st.one_of(st.integers(-9, 99), _NAMES), min_size=1, max_size=5)}
    ),
    st.builds(lambda value: {"const": value}, st.one_of(_NAMES, st.booleans())),
)


def _object(properties: dict[str, Any], required: int, closed: bool) -> dict[str, Any]:
    names = list(properties)
    made: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": names[:required],
    }
    return made | ({"additionalProperties": False} if closed else {})


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            _object, st.dictionaries(_NAMES, inner, max_size=4), st.integers(0, 4), st.booleans()
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner, "minItems": st.integers(0, 2),
             "maxItems": st.integers(2, 4)}
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )  # fmt: skip


SCHEMAS = st.builds(
    _object,
    st.dictionaries(_NAMES, st.recursive(_LEAVES, _containers, max_leaves=8), max_size=5),
    st.integers(0, 5),
    st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(content=SCHEMAS, seed=st.integers(0, 2**32))
def test_whatever_is_written_validates(writer: Writer, content: dict[str, Any], seed: int) -> None:
    ids = writer.write(schema(content), random.Random(seed))
    assume(ids is not None)
    assert ids is not None
    jsonschema.validate(json.loads(writer.text(ids)), content)


PATTERNS = r"[a-d](\+|\*|\?|\{1,3\})?(\|[a-d]{2})?([0-9x](\+|\?)?){1,3}"


@settings(max_examples=50, deadline=None)
@given(
    pattern=st.from_regex(
        r"[a-d](\+|\*|\?|\{1,3\})?(\|[a-d]{2})?([0-9x](\+|\?)?){1,3}", fullmatch=True
    ),
    seed=st.integers(0, 2**32),
)
def test_whatever_is_written_matches(writer: Writer, pattern: str, seed: int) -> None:
    ids = writer.write(regex(pattern), random.Random(seed))
    assert ids is not None
    assert re.fullmatch(pattern, writer.text(ids))
