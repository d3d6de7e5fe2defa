"""From a typed body to what is dispatched: prompts as token ids, limits settled, all checked.

Everything a client can get wrong is found here, before any node hears of the request.
"""

from collections.abc import Sequence
from random import Random
from uuid import uuid4

from router.chat import ChatPreparer
from router.choices import ChoiceSettler, Style, text_options
from router.config import RouterConfig
from router.errors import invalid
from router.grammar_checks import Grammars, with_grammar
from router.model_names import ModelNames
from router.nodes import NodeRegistry
from router.prepared import ChoiceSpec, Prepared
from router.protocol.knobs import check
from router.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    SglangSampling,
    refuse_unsupported,
)
from router.protocol.sglang_wishes import each, logprob_wishes
from router.tokens import ModelInfo, TextCodec
from router.tools.detect import detect_format
from router.tools.formats import FormatName
from router.tools.wish import ToolDesk

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default."""
SGLANG_MAX_TOKENS = 128
"""SGLang's default."""


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
        grammars: Grammars,
    ) -> None:
        self.codec = codec
        self.info = info
        self.names = names
        self._settler = ChoiceSettler(info, registry, config, random)
        self._grammars = grammars
        tools = ToolDesk(_tool_format(config, codec, info), codec.special_id, lambda: uuid4().hex)
        self.chats = ChatPreparer(codec, self._settler, names, grammars, tools)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output."""
        return self._settler.max_model_len

    # ------------------------------------------------------------ the three APIs

    async def completion(self, request: CompletionRequest) -> Prepared:
        """Check /v1/completions.

        Raises:
            ApiError: 400, 404 or 503.
        """
        self.names.entry(request.model)
        refuse_unsupported(request)
        knobs = request.completion_knobs()
        check(knobs, self._settler.bounds)
        knobs = await with_grammar(knobs, request.grammar_wish(), self._grammars)
        special = request.add_special_tokens is not False
        prompts = await self._prompts(request.prompt, "prompt", special)
        texts: tuple[str, ...] = ()
        if request.echo:
            texts = tuple(self._texts(request.prompt, prompts))
        style = Style("prompt", COMPLETION_MAX_TOKENS)
        options = text_options(
            knobs,
            request.include_stop_str_in_output,
            request.skip_special_tokens,
            prompt_only=request.prompt_only,
        )
        adapters = self.names.adapters_of(request.model, request.lora_path, len(prompts))
        choices = self._settler.choices(prompts, adapters, knobs, options, style)
        self._settler.check_scores(choices, knobs, streamed=request.stream)
        return Prepared(choices, len(prompts), texts, knobs.num_kept)

    async def chat(self, request: ChatRequest) -> Prepared:
        """Check /v1/chat/completions.

        Raises:
            ApiError: 400, 404 or 503.
        """
        return await self.chats.prepare(request)

    async def generate(self, request: GenerateRequest) -> Prepared:
        """Check SGLang's /generate.

        Raises:
            ApiError: 400, 404 or 503.
        """
        for field in ("image_data", "input_embeds", "token_ids_logprob"):
            if getattr(request, field) not in (None, "", []):
                raise invalid(f"{field} is not supported yet", field, "unsupported")
        if (request.text is None) == (request.input_ids is None):
            raise invalid("give either text or input_ids", "text")
        if request.text is not None:
            prompts = await self._prompts(request.text, "text", special=True)
        else:
            prompts = await self._prompts(list(request.input_ids or ()), "input_ids", special=True)
        adapters = self.names.adapters_of(None, request.lora_path, len(prompts))
        count = len(prompts)
        wishes = each(request.sampling_params, count, "sampling_params", SglangSampling())
        told = logprob_wishes(request, [len(prompt) for prompt in prompts])
        style = Style("text" if request.text is not None else "input_ids", SGLANG_MAX_TOKENS)
        choices: list[ChoiceSpec] = []
        for prompt, adapter, wish, tell in zip(prompts, adapters, wishes, told, strict=True):
            knobs = wish.knobs(tell.logprobs, tell.prompt_logprobs)
            if (knobs.n or 1) != (wishes[0].n or 1):
                raise invalid("n must be the same for all prompts", "sampling_params.n")
            check(knobs, self._settler.bounds)
            knobs = await with_grammar(knobs, wish.grammar_wish(), self._grammars)
            options = text_options(
                knobs, wish.no_stop_trim, wish.skip_special_tokens, prompt_only=wish.prompt_only
            )
            choices += self._settler.choices([prompt], [adapter], knobs, options, style)
        self._settler.check_count(len(choices))
        self._settler.check_scores(choices, knobs, streamed=request.stream)
        return Prepared(tuple(choices), len(prompts))

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


def _tool_format(config: RouterConfig, codec: TextCodec, info: ModelInfo) -> FormatName:
    """How the model writes calls of functions."""
    if config.tool_parser != "auto":
        return config.tool_parser
    return detect_format(
        codec.tool_source, info.model_type, lambda text: codec.special_id(text) is not None
    )
