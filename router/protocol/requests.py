"""Request bodies of all APIs, as typed structs. Unknown fields are ignored, null is the default.

Fields that would change the answer but are not done yet are listed, so that they can be refused
instead of being overlooked (`refuse_unsupported`).
"""

from typing import Any

import msgspec
from msgspec.structs import replace

from router.errors import invalid
from router.protocol.grammars import GuidedFields, Wish, sglang_wish
from router.protocol.knobs import Knobs
from router.protocol.terms import TermsFields
from router.protocol.tools import MessageCall, NamedChoice, Tool


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIRequest(GuidedFields, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    lora_path: str | list[str | None] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    # Refused unless empty:
    use_beam_search: Any = None

    def knobs(self, *, max_tokens: int | None, logprobs: int | None, max_name: str) -> Knobs:
        """The sampling wishes; the two APIs differ in these fields only."""
        return Knobs(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            logprobs=logprobs,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            prompt_logprobs=self.prompt_logprobs,
            n=self.n,
            best_of=self.best_of,
            names={"max_tokens": max_name},
        )


class CompletionRequest(OpenAIRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | bool | None = None
    """Some clients say true, as for chats; vLLM takes that for 1."""
    add_special_tokens: bool | None = None
    suffix: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.logprobs, bool):
            self.logprobs = 1 if self.logprobs else None

    @property
    def prompt_only(self) -> bool:
        """The prompt is to be echoed, with its logprobs perhaps, and nothing generated."""
        return bool(self.echo) and self.max_tokens == 0

    def completion_knobs(self) -> Knobs:
        """The sampling wishes. An echo with logprobs has the prompt's, too."""
        max_tokens = 1 if self.prompt_only else self.max_tokens
        knobs = self.knobs(max_tokens=max_tokens, logprobs=self.logprobs, max_name="max_tokens")
        if not self.echo or self.logprobs is None or self.logprobs < 0:
            return knobs
        names = {**knobs.names, "prompt_logprobs": "logprobs"}
        if self.prompt_logprobs is not None and self.prompt_logprobs >= self.logprobs:
            return knobs
        return replace(knobs, prompt_logprobs=self.logprobs, names=names)


class TextPart(msgspec.Struct):
    """A piece of a message; only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MessageCall] | None = None


class ChatRequest(OpenAIRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    continue_final_message: Any = None
    chat_template: Any = None


_UNSUPPORTED = (
    "suffix",
    "use_beam_search",
    "continue_final_message",
    "chat_template",
)


def refuse_unsupported(request: OpenAIRequest) -> None:
    """Refuse what would silently change the answer.

    Raises:
        ApiError: 400, naming the field.
    """
    for field in _UNSUPPORTED:
        value = getattr(request, field, None)
        if value not in (None, False, "", [], {}):
            raise invalid(f"{field} is not supported yet", field, "unsupported")
    for field in ("functions", "function_call"):
        if getattr(request, field, None) not in (None, [], "none"):
            raise invalid(f"{field} is not supported: use tools", field, "unsupported")
    if request.stream and request.prompt_logprobs is not None:
        raise invalid("prompt_logprobs cannot be streamed", "prompt_logprobs")
    if request.stream and (request.best_of or 0) > (request.n or 1):
        raise invalid("best_of greater than n cannot be streamed", "best_of")


class SglangSampling(msgspec.Struct, kw_only=True):
    """`sampling_params` of SGLang's /generate."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    stop_regex: Any = None

    @property
    def prompt_only(self) -> bool:
        """Nothing is to be generated: the prompt is cached, or told the logprobs of."""
        return self.max_new_tokens == 0

    def knobs(self, logprobs: int | None, prompt_logprobs: int | None = None) -> Knobs:
        """The sampling wishes.

        Raises:
            ApiError: 400 for a field that is not supported yet.
        """
        for field in ("structural_tag", "stop_regex"):
            if getattr(self, field) not in (None, "", []):
                name = f"sampling_params.{field}"
                raise invalid(f"{name} is not supported yet", name, "unsupported")
        return Knobs(
            max_tokens=1 if self.prompt_only else self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            seed=self.sampling_seed if self.sampling_seed is not None else self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            n=self.n,
            names=_SGLANG_NAMES,
        )

    def grammar_wish(self) -> Wish | None:
        """What the output must obey, if anything.

        Raises:
            ApiError: 400, naming the field.
        """
        return sglang_wish(self.json_schema, self.regex or None, self.ebnf or None)


_SGLANG_NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "seed": "sampling_params.sampling_seed",
} | {
    field: f"sampling_params.{field}"
    for field in SglangSampling.__struct_fields__
    if field != "seed"
}


class GenerateRequest(TermsFields, kw_only=True):
    """POST /generate, SGLang's own form."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    lora_path: str | list[str | None] | None = None
    image_data: Any = None
    input_embeds: Any = None
    token_ids_logprob: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize, of a prompt or of messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /load_lora_adapter."""

    lora_name: str
    lora_path: str
    pinned: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /unload_lora_adapter."""

    lora_name: str


class PauseRequest(msgspec.Struct, kw_only=True):
    """POST /pause_generation."""

    mode: str | None = None
    node: str | None = None


class NodeRequest(msgspec.Struct, kw_only=True):
    """POST /continue_generation, /flush_cache."""

    node: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None
    node: str | None = None
