"""What the output must obey, in each API's own words, as one `Grammar`. Pure."""

from dataclasses import dataclass
from typing import Any

import msgspec

from common.messages import Grammar, GrammarKind
from router.errors import invalid
from router.protocol.terms import TermsFields

ANY_JSON = "$$ANY$$"
"""SGLang's word for a schema that allows any object."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Wish:
    """A grammar as it was asked for, before anybody has tried to compile it."""

    grammar: Grammar
    field: str
    """Where it was asked for."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """`json_schema` of OpenAI's `response_format`. It is always followed strictly."""

    name: str | None = None
    schema_: Any = msgspec.field(name="schema", default=None)
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's, with the `schema` that some clients put beside `json_object`."""

    type: str | None = None
    json_schema: JsonSchemaFormat | None = None
    schema_: Any = msgspec.field(name="schema", default=None)

    def wishes(self) -> list[Wish]:
        """At most one."""
        match self.type:
            case None | "text":
                return []
            case "json_object":
                schema = {} if self.schema_ is None else self.schema_
                return [Wish(json_schema(schema, "response_format.schema"), "response_format")]
            case "json_schema":
                field = "response_format.json_schema"
                if self.json_schema is None:
                    raise invalid(f"{field} is missing", field)
                field = f"{field}.schema"
                if self.json_schema.schema_ is None:
                    raise invalid(f"{field} is missing", field)
                return [Wish(json_schema(self.json_schema.schema_, field), field)]
            case other:
                field = "response_format.type"
                message = f"{field} must be text, json_object or json_schema, not {other[:64]!r}"
                raise invalid(message, field, "unsupported")


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's newer spelling."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Any = None

    def wishes(self) -> list[Wish]:
        """All that are given."""
        prefix = "structured_outputs."
        for field in ("structural_tag", "whitespace_pattern"):
            if getattr(self, field) is not None:
                raise invalid(f"{prefix}{field} is not supported", prefix + field, "unsupported")
        any_json: dict[str, Any] | None = {} if self.json_object else None
        found = _wishes(prefix, self.json, self.regex, self.choice, self.grammar)
        return found + _wishes(prefix, any_json, json_name="json_object")


class GuidedFields(TermsFields, kw_only=True):
    """The fields of a body; both of OpenAI's APIs take them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def grammar_wish(self) -> Wish | None:
        """What is asked for, if anything.

        Raises:
            ApiError: 400, naming the field.
        """
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        wishes = _wishes("guided_", *guided)
        for part in (self.response_format, self.structured_outputs):
            wishes += [] if part is None else part.wishes()
        return only(wishes)


def sglang_wish(json: Any, regex: str | None, ebnf: str | None) -> Wish | None:
    """The same of SGLang's `sampling_params`.

    Raises:
        ApiError: 400, naming the field.
    """
    names = {"json_name": "json_schema", "grammar_name": "ebnf"}
    given = {} if json == ANY_JSON else json
    return only(_wishes("sampling_params.", given, regex, None, ebnf, **names))


def only(wishes: list[Wish]) -> Wish | None:
    """The single wish; nobody can obey two grammars.

    Raises:
        ApiError: 400, naming the second.
    """
    if len(wishes) > 1:
        first, second = wishes[0].field, wishes[1].field
        raise invalid(f"{second} cannot be combined with {first}", second)
    return wishes[0] if wishes else None


def json_schema(schema: Any, field: str) -> Grammar:
    """A grammar of JSON that a schema, an object or the text of one, allows.

    Raises:
        ApiError: 400, naming `field`.
    """
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"{field} is not JSON: {error}", field) from None
    if not isinstance(schema, dict):
        raise invalid(f"{field} must be a JSON schema, so an object", field)
    return Grammar(GrammarKind.JSON_SCHEMA, _encode(schema).decode())


def _wishes(
    prefix: str,
    json: Any = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
    *,
    json_name: str = "json",
    grammar_name: str = "grammar",
) -> list[Wish]:
    wishes = []
    if json is not None:
        field = prefix + json_name
        wishes.append(Wish(json_schema(json, field), field))
    if choice is not None:
        if not choice:
            raise invalid(f"{prefix}choice must not be empty", f"{prefix}choice")
        text = _encode(choice).decode()
        wishes.append(Wish(Grammar(GrammarKind.CHOICE, text), f"{prefix}choice"))
    texts = {"regex": (GrammarKind.REGEX, regex), grammar_name: (GrammarKind.EBNF, grammar)}
    for name, (kind, given) in texts.items():
        if given is not None:
            if not given:
                raise invalid(f"{prefix}{name} must not be empty", prefix + name)
            wishes.append(Wish(Grammar(kind, given), prefix + name))
    return wishes
