"""Grammars that make the model call, or let it call: JSON schemas of what `ForcedJson` reads."""

import json
from collections.abc import Sequence
from typing import Any

from common.messages import Grammar, GrammarKind
from router.errors import invalid
from router.protocol.grammars import Wish
from router.protocol.tools import Tool

_DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are data, in which `$ref` is a word like any other."""
_BY_NAME = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)
"""Keywords whose values are schemas by names, which may be any words."""
_SHAPES = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf"})


def calls_grammar(tools: Sequence[Tool], arguments_key: str, *, many: bool) -> Grammar:
    """One call of one of `tools`, or `many`: a list of one or more.

    Raises:
        ApiError: 400 for parameters that are nested too deeply.
    """
    definitions, calls = _calls(tools, arguments_key)
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return _grammar(_listed(call) if many else call, definitions)


def calls_or_answer(
    tools: Sequence[Tool], arguments_key: str, answer: Wish, *, many: bool
) -> Grammar:
    """A call of one of `tools`, `many`: also a list of them; or else what `answer` demands.

    Raises:
        ApiError: 400 for what is nested too deeply, and when `answer` is no JSON schema.
    """
    if answer.grammar.kind is not GrammarKind.JSON_SCHEMA:
        message = f"{answer.field} cannot be combined with tools that may be called"
        raise invalid(message, answer.field, "unsupported")
    definitions, calls = _calls(tools, arguments_key)
    schema = json.loads(answer.grammar.text)
    definitions["answer"] = _below("answer", schema or {"type": "object"}, answer.field)
    lists = [_listed({"anyOf": calls})] if many else []
    return _grammar({"anyOf": [{"$ref": "#/$defs/answer"}, *calls, *lists]}, definitions)


def _grammar(schema: dict[str, Any], definitions: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**schema, "$defs": definitions}))


def _listed(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": call, "minItems": 1}


def _calls(
    tools: Sequence[Tool], arguments_key: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Definitions of the functions' parameters, and for each function a schema of its calls."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        place = f"f{i}"
        definitions[place] = _below(place, _object_schema(tool), "tools")
        properties = {
            "name": {"const": tool.function.name},
            arguments_key: {"$ref": f"#/$defs/{place}"},
        }
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
        )
    return definitions, calls


def _object_schema(tool: Tool) -> dict[str, Any]:
    """Arguments are an object, also where the schema does not say so."""
    schema = tool.function.schema
    return schema if schema.keys() & _SHAPES else {"type": "object", **schema}


def _below(place: str, schema: Any, field: str) -> Any:
    """A schema as it is as one of the definitions of a larger one."""
    try:
        return _moved(schema, f"#/$defs/{place}")
    except RecursionError:
        raise invalid(f"{field}: a schema is nested too deeply", field) from None


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references into itself as they are below `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved(inner, root) for name, inner in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, root)
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = root + reference[1:]
    return moved
