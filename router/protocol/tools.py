"""What chat requests say of functions: those that may be called, and calls in the conversation."""

from typing import Any

import msgspec

NO_PARAMETERS = {"type": "object", "properties": {}}
"""What OpenAI takes missing parameters for."""


class Function(msgspec.Struct):
    """One that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def schema(self) -> dict[str, Any]:
        return NO_PARAMETERS if self.parameters is None else self.parameters


class Tool(msgspec.Struct):
    type: str
    function: Function

    def plain(self) -> dict[str, Any]:
        """As templates expect it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        return {"type": "function", "function": {**function, "parameters": self.function.schema}}


class NamedFunction(msgspec.Struct):
    name: str


class NamedChoice(msgspec.Struct):
    """A `tool_choice` that is not a word."""

    type: str
    function: NamedFunction | None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class MessageCall(msgspec.Struct):
    """A call in an assistant's message."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None
