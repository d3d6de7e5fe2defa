"""A schema with a bit of everything, bounded so that an output of any model comes to its end."""

import json
from typing import Any

import jsonschema

_ITEM = {
    "type": "object",
    "properties": {
        "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "colour": {"enum": ["red", "green", None]},
    },
    "required": ["sku", "count"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "vip": {"type": "boolean"},
        "born": {"type": "string", "pattern": "^(19|20)[0-9]{2}-(0[1-9]|1[0-2])$"},
        "items": {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": 2},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 8}]},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 10},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "vip", "items", "address"],
    "additionalProperties": False,
}
_JUDGE = jsonschema.Draft202012Validator(SCHEMA)


def problem(text: str) -> str | None:
    """Why a text is not what the schema says; None if it is."""
    try:
        _JUDGE.validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{str(error).splitlines()[0]}: {text!r}"
    return None


def response_format() -> dict[str, Any]:
    """As OpenAI's clients send it."""
    wish = {"name": "order", "schema": SCHEMA, "strict": True}
    return {"type": "json_schema", "json_schema": wish}
