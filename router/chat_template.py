"""The chat template that a model brings along, rendered in a sandbox.

Templates are written for transformers' renderer: a Jinja environment without whitespace around
blocks, with `raise_exception`, `strftime_now`, loop controls and a `tojson` that does not escape
HTML. The same is given here: transformers itself imports torch, for which a router has no use.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.tools.spelled_out import spell_out


class ChatTemplateError(ValueError):
    """These messages cannot be rendered; says why."""


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.takes_tools = "tools" in names
        """Whether it tells the model of functions."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        Raises:
            ChatTemplateError: the template refuses the messages or fails on them.
        """
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        variables.update(extra or {})
        if tools:
            variables["tools"] = list(tools)
        try:
            return self._template.render(
                **{
                    **variables,
                    "messages": list(messages),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateError as error:
            raise ChatTemplateError(str(error)) from error
        except Exception as error:  # a model's own code, given a client's own values
            raise ChatTemplateError(f"the chat template failed: {error}") from error


class ChatTemplates:
    """A model's templates: the usual one, and for some models another for functions."""

    def __init__(self, usual: ChatTemplate, tool_use: ChatTemplate | None = None) -> None:
        self._usual = usual
        self._tool_use = tool_use or usual

    @property
    def tool_source(self) -> str:
        """What shows the model functions."""
        return self._tool_use.source

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. A template that knows no functions gets them spelled out.

        Raises:
            ChatTemplateError: the template refuses the messages or fails on them.
        """
        messages = [self._known_role(message) for message in messages]
        used = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        template = self._tool_use if tools or used else self._usual
        if not template.takes_tools and (tools or used):
            messages, tools = spell_out(messages, tools), ()
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra
        )

    def _known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        """OpenAI renamed the system's role; few models were taught the new name."""
        if message["role"] != "developer" or "developer" in self._usual.source:
            return message
        return {**message, "role": "system"}


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
