"""What a chat request wants of functions: checked, and made into prompt, parser and grammar."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from router.errors import invalid
from router.protocol.grammars import Wish
from router.protocol.tools import NamedChoice, Tool
from router.tools.forced import calls_grammar, calls_or_answer
from router.tools.formats import FORMATS, ForcedJson, FormatName
from router.tools.options import CallOptions
from router.tools.parser import CallParser

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""OpenAI allows 64 characters without the punctuation; servers of tools use some of it."""

TokenId = Callable[[str], int | None]
"""The id of a special token, if the model has it."""


@dataclass(frozen=True, slots=True)
class ToolWish:
    """Checked. The default is what a request gets that asks for nothing."""

    tools: tuple[dict[str, Any], ...] = ()
    """As the template gets them."""
    calls: CallOptions | None = None
    """None: the answer is text, whatever it looks like."""
    grammar: Wish | None = None
    """What the model is held to, be it to calls."""


class ToolDesk:
    """Settles wishes for one model, whose calls have one format."""

    def __init__(self, name: FormatName, token_id: TokenId, make_id: Callable[[], str]) -> None:
        """`make_id` makes a random name of 32 letters and digits."""
        self._format = name
        self._parser = FORMATS[name]
        self._make_id = make_id
        self._markers = {
            id_: marker
            for marker in self._parser.special_markers
            if (id_ := token_id(marker)) is not None
        }

    def wish(
        self,
        tools: Sequence[Tool] | None,
        choice: str | NamedChoice | None,
        *,
        parallel: bool = True,
        answer: Wish | None = None,
    ) -> ToolWish:
        """Check what a request says. `answer` is the grammar it wants for what is no call.

        Raises:
            ApiError: 400, naming the field.
        """
        tools = tools or ()
        _check(tools)
        wanted = self._wanted(tools, choice)
        if not tools or choice == "none":
            return ToolWish(grammar=answer)
        plain = tuple(tool.plain() for tool in tools)
        key = self._parser.arguments_key
        if wanted is not None:
            named = isinstance(choice, NamedChoice)
            many = parallel and not named
            options = self._options(ForcedJson, wanted, parallel=many, by_name=named)
            return ToolWish(plain, options, Wish(calls_grammar(wanted, key, many=many), "tools"))
        if answer is None:
            return ToolWish(plain, self._options(self._parser, tools, parallel=parallel))
        grammar = calls_or_answer(tools, key, answer, many=parallel)
        options = self._options(ForcedJson, tools, parallel=parallel)
        return ToolWish(plain, options, Wish(grammar, answer.field))

    def _wanted(
        self, tools: Sequence[Tool], choice: str | NamedChoice | None
    ) -> Sequence[Tool] | None:
        """Those of which one must be called; None: none must."""
        if choice in (None, "auto", "none"):
            return None
        if choice == "required":
            if not tools:
                raise invalid("tool_choice required needs tools", "tool_choice")
            return tools
        if isinstance(choice, str):
            message = "tool_choice must be none, auto, required or a function"
            raise invalid(message, "tool_choice")
        assert choice is not None
        if choice.type != "function":
            message = f"tool_choice.type must be function, not {choice.type[:64]!r}"
            raise invalid(message, "tool_choice.type", "unsupported")
        if choice.function is None:
            raise invalid("tool_choice.function is missing", "tool_choice.function")
        name = choice.function.name
        wanted = [tool for tool in tools if tool.function.name == name]
        if not wanted:
            message = f"tool_choice: {name[:128]!r} is not among the tools"
            raise invalid(message, "tool_choice.function.name")
        return wanted

    def _options(
        self,
        parser: type[CallParser],
        tools: Sequence[Tool],
        *,
        parallel: bool,
        by_name: bool = False,
    ) -> CallOptions:
        return CallOptions(
            parser=parser,
            names=frozenset(tool.function.name for tool in tools),
            make_id=self._mistral_id if self._format == "mistral" else self._id,
            markers=self._markers,
            max_calls=None if parallel else 1,
            by_name=by_name,
        )

    def _id(self) -> str:
        return f"call_{self._make_id()[:24]}"

    def _mistral_id(self) -> str:
        """Mistral's templates refuse ids of another length when they come back."""
        return self._make_id()[:9]


def _check(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools: at most {MAX_TOOLS}, not {len(tools)}", "tools")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.type != "function":
            message = f"{where}.type must be function, not {tool.type[:64]!r}"
            raise invalid(message, f"{where}.type", "unsupported")
        name = tool.function.name
        if _NAME.fullmatch(name) is None:
            allowed = "1 to 128 of the characters A-Z, a-z, 0-9, _ . : / and -"
            field = f"{where}.function.name"
            raise invalid(f"{field} must be {allowed}, not {name[:130]!r}", field)
        if name in names:
            field = f"{where}.function.name"
            raise invalid(f"{field}: there are two functions {name}", field)
        names.add(name)
        if tool.function.schema.get("type", "object") != "object":
            field = f"{where}.function.parameters"
            raise invalid(f"{field}.type must be object", field)
