"""A grammar that makes the model call: a JSON schema of calls for `ForcedJson` to read."""

import json
from collections.abc import Sequence
from typing import Any

from common.messages import Grammar, GrammarKind
from router.errors import invalid
from router.protocol.tools import Tool

_DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are data, in which `$ref` is a word like any other."""
_SHAPES = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf"})


def calls_grammar(tools: Sequence[Tool], arguments_key: str, *, many: bool) -> Grammar:
    """One call of one of `tools`, or `many`: a list of one or more.

    Each function's parameters become a definition of the whole schema, and the references in them
    are moved along.

    Raises:
        ApiError: 400 for parameters that are nested too deeply.
    """
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        try:
            definitions[f"f{i}"] = _moved(_object_schema(tool), f"#/$defs/f{i}")
        except RecursionError:
            field = f"tools[{i}].function.parameters"
            raise invalid(f"{field} are nested too deeply", field) from None
        properties = {
            "name": {"const": tool.function.name},
            arguments_key: {"$ref": f"#/$defs/f{i}"},
        }
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
        )
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = {"type": "array", "items": call, "minItems": 1} if many else call
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**schema, "$defs": definitions}))


def _object_schema(tool: Tool) -> dict[str, Any]:
    """Arguments are an object, also where the schema does not say so."""
    schema = tool.function.schema
    return schema if schema.keys() & _SHAPES else {"type": "object", **schema}


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references into itself as they are below `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: value if key in _DATA else _moved(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
