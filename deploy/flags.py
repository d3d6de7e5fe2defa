"""From command-line arguments to frozen settings; whatever is wrong is one line.

tyro makes the flags from the dataclass. Three things are added: list flags can be repeated
(`--router a --router b`) as well as given as a list (`--router a b`); the value of a flag that
carries other flags may begin with dashes (`--prefill-args "--ucx-tls tcp"`); and a mistake is a
`StartupError` with one line instead of a drawn box, so that it can be read in a log too.
"""

import dataclasses
import io
import re
import typing
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import TypeVar

from deploy.errors import StartupError

Settings = TypeVar("Settings")

_BOX = re.compile(r"[│╭╮╰╯]")
_RULE = re.compile(r"^[\s─]+$")


def parse_flags(settings: type[Settings], prog: str, args: Sequence[str]) -> Settings:
    """The settings that `args` describe; prints help and exits for `--help`.

    Raises:
        StartupError: an unknown flag, a value of the wrong type, or one out of its range.
    """
    import tyro

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(settings, prog=prog, args=normalise(settings, args))
    except SystemExit as end:
        if not end.code:
            raise
        raise StartupError(_one_line(said.getvalue())) from None


def normalise(settings: type, args: Sequence[str]) -> list[str]:
    """`args` with a list flag's values behind one occurrence of it, and `*-args` values bound."""
    hints = typing.get_type_hints(settings)
    fields = {"--" + field.name.replace("_", "-"): field for field in dataclasses.fields(settings)}
    lists = {
        name for name, field in fields.items() if typing.get_origin(hints[field.name]) is tuple
    }
    merged: list[str] = []
    values: dict[str, list[str]] = {}
    current: list[str] | None = None
    remaining = iter(args)
    for arg in remaining:
        name, equals, value = arg.partition("=")
        name = name.replace("_", "-")
        if name in lists:
            current = values.setdefault(name, [])
            current += [value] if equals else []
        elif name in fields and name.endswith("-args") and not equals:
            current = None
            value_given = next(remaining, None)
            merged.append(arg if value_given is None else f"{name}={value_given}")
        elif arg.startswith("--") or current is None:
            current = None
            merged.append(arg)
        else:
            current.append(arg)
    for name, given in values.items():
        merged += [name, *given]
    return merged


def _one_line(box: str) -> str:
    """What tyro's error box says, up to its first rule, and the flag it suggests."""
    lines = [_BOX.sub("", line).strip() for line in box.splitlines()]
    # The first line is the box's title, drawn into its border.
    body = [line for line in lines[1:] if line]
    rule = next((i for i, line in enumerate(body) if _RULE.match(line)), len(body))
    message = " ".join(body[:rule]) or " ".join(lines)
    suggested = re.search(r"Perhaps you meant: (--[\w-]+)", " ".join(body[rule:]))
    return f"{message} (perhaps {suggested[1]}?)" if suggested else message
