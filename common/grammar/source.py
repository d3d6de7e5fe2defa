"""From a `Grammar` to what the library compiles."""

import json
from typing import assert_never

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from common.grammar.errors import GrammarError
from common.messages import Grammar, GrammarKind

WHITESPACE = r"(\n {0,20}| )?"
"""Between the tokens of JSON: none, a space, or a new line with its indentation. Bounded, since a
model that is lost would go on with whitespace until its tokens are used up."""


def library_source(grammar: Grammar) -> str:
    """What `LLMatcher` takes.

    Raises:
        GrammarError: the text is not what its kind says.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_schema('{"type":"object"}' if grammar.text == "{}" else grammar.text)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_lark(_choice(grammar.text))
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(grammar.text)
        case _:
            assert_never(grammar.kind)


def as_lark(grammar: Grammar) -> Grammar:
    """The same grammar in the notation that nodes take: `root ::= ...` becomes `start: ...`.

    Raises:
        GrammarError: it is neither notation.
    """
    if grammar.kind is not GrammarKind.EBNF or "::=" not in grammar.text:
        return grammar
    try:
        return Grammar(GrammarKind.EBNF, any_to_lark(grammar.text))
    except Exception as error:  # the converter raises bare Exception
        raise GrammarError(f"neither Lark nor EBNF: {error}") from None


def _json_schema(schema: str) -> str:
    """Our options override a schema's own: what is not understood is refused, never ignored."""
    try:
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "whitespace_flexible": True,
                "whitespace_pattern": WHITESPACE,
                "lenient": False,
                "coerce_one_of": False,
            },
        )
    except ValueError as error:
        raise GrammarError(str(error)) from None


def _choice(text: str) -> str:
    try:
        choices = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"the choices are not JSON: {error}") from None
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("the choices must be a list of strings")
    if not choices:
        raise GrammarError("there is no choice")
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)
