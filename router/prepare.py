"""From a typed body to what is dispatched: prompts as token ids, limits settled, all checked.

Everything a client can get wrong is found here, before any node hears of the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from common.messages import Adapter
from router.chat_template import ChatTemplateError
from router.config import RouterConfig
from router.errors import invalid
from router.model_names import ModelNames
from router.nodes import NodeRegistry
from router.prepared import ChoiceSpec, Prepared
from router.protocol.knobs import Bounds, Knobs, check, sampling_params, stops
from router.protocol.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    SglangSampling,
    refuse_unsupported,
)
from router.text_stream import TextOptions
from router.tokens import ModelInfo, TextCodec

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default."""
SGLANG_MAX_TOKENS = 128
"""SGLang's default."""


@dataclass(frozen=True, slots=True)
class _Style:
    """How an API names the prompt and what it does without `max_tokens`."""

    prompt: str
    default_max_tokens: int | None
    """None: what fits."""


class Preparer:
    """Checks and tokenises for one model."""

    def __init__(
        self,
        codec: TextCodec,
        info: ModelInfo,
        registry: NodeRegistry,
        config: RouterConfig,
        names: ModelNames,
        random: Random,
    ) -> None:
        self.codec = codec
        self.info = info
        self.names = names
        self._registry = registry
        self._random = random
        self._max_choices = config.max_choices
        self._bounds = Bounds(
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            defaults=info.defaults,
            max_n=config.max_n,
            max_logprobs=config.max_logprobs,
        )

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output."""
        return self._registry.max_model_len(self.info.max_model_len)

    # ------------------------------------------------------------ the three APIs

    async def completion(self, request: CompletionRequest) -> Prepared:
        """Check /v1/completions.

        Raises:
            ApiError: 400, 404 or 503.
        """
        self.names.entry(request.model)
        refuse_unsupported(request)
        if request.echo and request.logprobs is not None:
            raise invalid("echo with logprobs is not supported yet", "echo", "unsupported")
        knobs = request.knobs(
            max_tokens=request.max_tokens, logprobs=request.logprobs, max_name="max_tokens"
        )
        check(knobs, self._bounds)
        special = request.add_special_tokens is not False
        prompts = await self._prompts(request.prompt, "prompt", special)
        texts: tuple[str, ...] = ()
        if request.echo:
            texts = tuple(self._texts(request.prompt, prompts))
        style = _Style("prompt", COMPLETION_MAX_TOKENS)
        options = _text_options(
            knobs, request.include_stop_str_in_output, request.skip_special_tokens
        )
        adapters = self.names.adapters_of(request.model, request.lora_path, len(prompts))
        choices = self._choices(prompts, adapters, knobs, options, style)
        return Prepared(choices, len(prompts), texts)

    async def chat(self, request: ChatRequest) -> Prepared:
        """Check /v1/chat/completions.

        Raises:
            ApiError: 400, 404 or 503.
        """
        adapters = self.names.adapters_of(request.model, request.lora_path, 1)
        refuse_unsupported(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs needs logprobs", "top_logprobs")
        max_name = "max_completion_tokens"
        max_tokens = request.max_completion_tokens
        if max_tokens is None:
            max_name, max_tokens = "max_tokens", request.max_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        knobs = request.knobs(max_tokens=max_tokens, logprobs=logprobs, max_name=max_name)
        names = {**knobs.names, "logprobs": "top_logprobs"}
        knobs = Knobs(
            **{f: getattr(knobs, f) for f in Knobs.__slots__ if f != "names"}, names=names
        )
        check(knobs, self._bounds)
        ids = await self.chat_ids(
            request.messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            extra=request.chat_template_kwargs,
        )
        options = _text_options(
            knobs, request.include_stop_str_in_output, request.skip_special_tokens
        )
        style = _Style("messages", None)
        return Prepared(self._choices([ids], adapters, knobs, options, style), 1)

    async def generate(self, request: GenerateRequest) -> Prepared:
        """Check SGLang's /generate.

        Raises:
            ApiError: 400, 404 or 503.
        """
        for field in ("image_data", "input_embeds", "token_ids_logprob"):
            if getattr(request, field) not in (None, "", []):
                raise invalid(f"{field} is not supported yet", field, "unsupported")
        if request.return_logprob and request.logprob_start_len not in (None, -1):
            name = "logprob_start_len"
            raise invalid("logprobs of the prompt are not supported yet", name, "unsupported")
        if (request.text is None) == (request.input_ids is None):
            raise invalid("give either text or input_ids", "text")
        if request.text is not None:
            prompts = await self._prompts(request.text, "text", special=True)
        else:
            prompts = await self._prompts(list(request.input_ids or ()), "input_ids", special=True)
        adapters = self.names.adapters_of(None, request.lora_path, len(prompts))
        wishes = _per_prompt(request.sampling_params, len(prompts))
        logprobs = (request.top_logprobs_num or 0) if request.return_logprob else None
        style = _Style("text" if request.text is not None else "input_ids", SGLANG_MAX_TOKENS)
        choices: list[ChoiceSpec] = []
        for prompt, adapter, wish in zip(prompts, adapters, wishes, strict=True):
            knobs = wish.knobs(logprobs)
            if (knobs.n or 1) != (wishes[0].n or 1):
                raise invalid("n must be the same for all prompts", "sampling_params.n")
            check(knobs, self._bounds)
            options = _text_options(knobs, wish.no_stop_trim, wish.skip_special_tokens)
            choices += self._choices([prompt], [adapter], knobs, options, style)
        self._check_count(len(choices))
        return Prepared(tuple(choices), len(prompts))

    async def chat_ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
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
            text = self.codec.render_chat(
                plain, add_generation_prompt=add_generation_prompt, extra=extra
            )
        except ChatTemplateError as error:
            raise invalid(str(error), "messages") from None
        return await self.codec.encode(text, add_special_tokens=False)

    # ------------------------------------------------------------ prompts

    async def _prompts(
        self, prompt: str | Sequence[str | int | list[int]], field: str, special: bool
    ) -> list[list[int]]:
        """Token ids of each prompt; all forms of OpenAI's `prompt`."""
        if isinstance(prompt, str):
            return [await self._encode(prompt, field, special)]
        if not prompt:
            raise invalid(f"{field} must not be empty", field)
        if all(isinstance(item, int) for item in prompt):
            return [self._checked(list(prompt), field)]  # type: ignore[arg-type]
        prompts: list[list[int]] = []
        for item in prompt:
            if isinstance(item, int):
                raise invalid(f"{field} mixes token ids with prompts", field, "invalid_type")
            if isinstance(item, str):
                prompts.append(await self._encode(item, field, special))
            else:
                prompts.append(self._checked(item, field))
        return prompts

    async def _encode(self, text: str, field: str, special: bool) -> list[int]:
        ids = await self.codec.encode(text, add_special_tokens=special) if text else []
        if not ids:
            raise invalid(f"{field} must not be empty", field)
        return ids

    def _checked(self, ids: list[int], field: str) -> list[int]:
        if not ids:
            raise invalid(f"{field} must not be empty", field)
        if min(ids) < 0 or max(ids) >= self.info.vocab_size:
            limit = self.info.vocab_size
            raise invalid(f"{field}: token ids must be in [0, {limit})", field)
        return ids

    def _texts(
        self, prompt: str | Sequence[str | int | list[int]], prompts: list[list[int]]
    ) -> list[str]:
        """The prompts as they are echoed: as they were written, or decoded."""
        given = [prompt] if isinstance(prompt, str) else prompt
        return [
            item if isinstance(item, str) else self.codec.decode(ids)
            for item, ids in zip(given, prompts, strict=False)
        ]

    # ------------------------------------------------------------ choices

    def _choices(
        self,
        prompts: list[list[int]],
        adapters: list[Adapter | None],
        knobs: Knobs,
        options: TextOptions,
        style: _Style,
    ) -> tuple[ChoiceSpec, ...]:
        n = knobs.n or 1
        self._check_count(len(prompts) * n)
        specs: list[ChoiceSpec] = []
        for prompt, adapter in zip(prompts, adapters, strict=True):
            max_tokens = self._settle_max_tokens(len(prompt), knobs, style)
            sampling = sampling_params(
                knobs, self._bounds, max_tokens=max_tokens, random=self._random
            )
            for choice in range(n):
                drawn = msgspec.structs.replace(sampling, choice=choice)
                specs.append(ChoiceSpec(prompt, drawn, options, adapter))
        return tuple(specs)

    def _check_count(self, count: int) -> None:
        if count > self._max_choices:
            message = f"prompts times n must not exceed {self._max_choices}, not {count}"
            raise invalid(message, "n")

    def _settle_max_tokens(self, prompt_tokens: int, knobs: Knobs, style: _Style) -> int:
        """The request's `max_tokens`: what was asked if it fits, else the API's default."""
        context = self.max_model_len
        capacity = self._registry.capacity_tokens()
        name = knobs.name("max_tokens")
        left = context - prompt_tokens
        if left < 1:
            message = f"{style.prompt}: {prompt_tokens} tokens leave no room in {context}"
            raise invalid(message, style.prompt, "context_length_exceeded")
        if knobs.max_tokens is not None and knobs.max_tokens > left:
            message = (
                f"{prompt_tokens} prompt tokens and {name} {knobs.max_tokens} exceed the "
                f"model's context of {context} tokens"
            )
            raise invalid(message, name, "context_length_exceeded")
        held = left if capacity is None else min(left, capacity - prompt_tokens)
        if held < 1 or (knobs.max_tokens or 0) > held:
            field = name if held >= 1 else style.prompt
            message = f"{prompt_tokens} prompt tokens and {name} exceed every node's KV pool"
            raise invalid(f"{message} of {capacity} tokens", field, "too_large")
        settled = knobs.max_tokens or min(held, style.default_max_tokens or held)
        if (knobs.min_tokens or 0) > settled:
            field = knobs.name("min_tokens")
            raise invalid(f"{field} must not exceed {name}, which is {settled}", field)
        return settled


def _text_options(
    knobs: Knobs, include_stop: bool | None, skip_special_tokens: bool | None
) -> TextOptions:
    return TextOptions(
        stops=stops(knobs),
        include_stop=bool(include_stop),
        skip_special_tokens=skip_special_tokens is not False,
        min_tokens=knobs.min_tokens or 0,
    )


def _per_prompt(
    wishes: SglangSampling | list[SglangSampling] | None, count: int
) -> list[SglangSampling]:
    if not isinstance(wishes, list):
        return [wishes or SglangSampling()] * count
    if len(wishes) != count:
        message = f"sampling_params: {len(wishes)} given for {count} prompts"
        raise invalid(message, "sampling_params")
    return wishes


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
    return plain
