"""How the families of models write calls: a class for each, and how to know a model's own."""

from collections.abc import Mapping
from typing import Literal

from router.tools.named_payload import NamedReader
from router.tools.parser import CallParser, Reader
from router.tools.payload import CallsReader

FormatName = Literal["hermes", "llama3_json", "mistral"]


class Hermes(CallParser):
    """`<tool_call>{"name": .., "arguments": {..}}</tool_call>`, one or several, text around them.

    Hermes, Qwen 2.5 and Qwen 3 write it so; SmolLM2 writes a list in the middle.
    """

    opening = "<tool_call>"
    closing = "</tool_call>"
    special_markers = (opening, closing)

    def _new_reader(self) -> Reader:
        return CallsReader(self._log, self._names)


class Llama3Json(CallParser):
    """`{"name": .., "parameters": {..}}` as the whole answer; several with a semicolon between.

    Llama 3.1 and 3.2; `<|python_tag|>` may stand before it, also after text.
    """

    opening = "<|python_tag|>"
    closing = ";"
    special_markers = (opening,)
    arguments_key = "parameters"
    bare = True

    def _new_reader(self) -> Reader:
        return CallsReader(self._log, self._names, demand_arguments=True)


class Mistral(CallParser):
    """`[TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]`; now `[TOOL_CALLS]name[ARGS]{..}`.

    The newer form repeats the marker for each call.
    """

    opening = "[TOOL_CALLS]"
    special_markers = (opening, "[CALL_ID]", "[ARGS]")

    def _new_reader(self) -> Reader:
        return NamedReader(self._log, self._names)


class ForcedJson(CallParser):
    """The JSON itself, which a grammar has made the model write."""

    bare = True

    def _new_reader(self) -> Reader:
        return CallsReader(self._log, self._names, demand_arguments=True)


FORMATS: Mapping[FormatName, type[CallParser]] = {
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
}
