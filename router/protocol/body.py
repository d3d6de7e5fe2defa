"""From a request's bytes to a typed struct, with errors that name the field."""

import re
from typing import TypeVar

import msgspec

from router.errors import ApiError, invalid

Body = TypeVar("Body")

_WHERE = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `(.+?)`")


def decode_body(decoder: msgspec.json.Decoder[Body], raw: bytes) -> Body:
    """The struct in a JSON body; unknown fields are ignored.

    Raises:
        ApiError: 400, naming the field that has a wrong type.
    """
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        message = str(error)
        raise invalid(message, _param(message), "invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


def _param(message: str) -> str | None:
    """The path that msgspec's message ends with, as a client would write it."""
    where = _WHERE.search(message)
    path = where.group(1) if where else ""
    missing = _MISSING.search(message)
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
    return path or None
