"""Chat completions, from a typed body to what is dispatched."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from router.chat_template import ChatTemplateError
from router.choices import ChoiceSettler, Style, text_options
from router.errors import invalid
from router.grammar_checks import Grammars, with_grammar
from router.model_names import ModelNames
from router.prepared import Prepared
from router.protocol.knobs import check
from router.protocol.requests import ChatMessage, ChatRequest, refuse_unsupported
from router.protocol.tools import MessageCall, Tool
from router.tokens import TextCodec
from router.tools.wish import ToolDesk


class ChatPreparer:
    """Checks conversations and renders them with the model's template."""

    def __init__(
        self,
        codec: TextCodec,
        settler: ChoiceSettler,
        names: ModelNames,
        grammars: Grammars,
        tools: ToolDesk,
    ) -> None:
        self._codec = codec
        self._settler = settler
        self._names = names
        self._grammars = grammars
        self._tools = tools

    async def prepare(self, request: ChatRequest) -> Prepared:
        """Check /v1/chat/completions.

        Raises:
            ApiError: 400, 404 or 503.
        """
        adapters = self._names.adapters_of(request.model, request.lora_path, 1)
        refuse_unsupported(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs needs logprobs", "top_logprobs")
        max_name = "max_completion_tokens"
        max_tokens = request.max_completion_tokens
        if max_tokens is None:
            max_name, max_tokens = "max_tokens", request.max_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        knobs = request.knobs(max_tokens=max_tokens, logprobs=logprobs, max_name=max_name)
        knobs = replace(knobs, names={**knobs.names, "logprobs": "top_logprobs"})
        check(knobs, self._settler.bounds)
        wish = self._tools.wish(
            request.tools,
            request.tool_choice,
            parallel=request.parallel_tool_calls is not False,
            answer=request.grammar_wish(),
        )
        knobs = await with_grammar(knobs, wish.grammar, self._grammars)
        ids = await self.ids(
            request.messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            tools=wish.tools,
            extra=request.chat_template_kwargs,
        )
        options = text_options(
            knobs, request.include_stop_str_in_output, request.skip_special_tokens, wish.calls
        )
        style = Style("messages", None)
        choices = self._settler.choices([ids], adapters, knobs, options, style)
        self._settler.check_scores(choices, knobs, streamed=request.stream)
        return Prepared(choices, 1, num_kept=knobs.num_kept)

    def tools(self, tools: Sequence[Tool] | None) -> Sequence[dict[str, Any]]:
        """Functions as the template gets them.

        Raises:
            ApiError: 400.
        """
        return self._tools.wish(tools, None).tools

    async def ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] = (),
        extra: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ApiError: 400.
        """
        if not messages:
            raise invalid("messages must not be empty", "messages")
        plain = [_plain_message(i, message) for i, message in enumerate(messages)]
        try:
            text = self._codec.render_chat(
                plain, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra
            )
        except ChatTemplateError as error:
            raise invalid(str(error), "messages") from None
        return await self._codec.encode(text, add_special_tokens=False)


def _plain_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: text only."""
    where = f"messages[{index}]"
    if not message.role:
        raise invalid(f"{where}.role must not be empty", f"{where}.role")
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                field = f"{where}.content"
                raise invalid(f"{field}: only text parts are supported", field, "unsupported")
        content = "\n".join(part.text or "" for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content or ""}
    for field in ("name", "tool_call_id"):
        value = getattr(message, field)
        if value is not None:
            plain[field] = value
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _plain_call(call: MessageCall) -> dict[str, Any]:
    """A call as templates expect it: its arguments as an object.

    What is no object, say because it was cut off when the model wrote it, stays as it is.
    """
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(arguments.strip() or "{}")
            arguments = read if isinstance(read, dict) else arguments
    function = {"name": call.function.name, "arguments": {} if arguments is None else arguments}
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": function}
