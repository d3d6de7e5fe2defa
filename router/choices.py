"""From checked wishes to choices: how many, how long, drawn with which seed; shared by all APIs."""

from collections.abc import Sequence
from random import Random

import msgspec

from common.messages import Adapter
from router.config import RouterConfig
from router.errors import invalid
from router.nodes import NodeRegistry
from router.prepared import ChoiceSpec
from router.protocol.knobs import Bounds, Knobs, sampling_params, stops
from router.text_stream import TextOptions
from router.tokens import ModelInfo
from router.tools.options import CallOptions

SCORE_BYTES = 128
"""What a prompt token's logprob becomes in a stream, at most about."""


class Style(msgspec.Struct, frozen=True):
    """How an API names the prompt and what it does without `max_tokens`."""

    prompt: str
    default_max_tokens: int | None
    """None: what fits."""


class ChoiceSettler:
    """Settles limits by the model, the settings and the nodes that are there."""

    def __init__(
        self, info: ModelInfo, registry: NodeRegistry, config: RouterConfig, random: Random
    ) -> None:
        self._info = info
        self._registry = registry
        self._random = random
        self._max_choices = config.max_choices
        self._max_scores = config.max_prompt_logprobs
        self._max_streamed_scores = config.max_unsent_bytes // SCORE_BYTES
        self.bounds = Bounds(
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            defaults=info.defaults,
            max_n=config.max_n,
            max_logprobs=config.max_logprobs,
        )

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output."""
        return self._registry.fleet.max_model_len(self._info.max_model_len)

    def choices(
        self,
        prompts: list[list[int]],
        adapters: list[Adapter | None],
        knobs: Knobs,
        options: TextOptions,
        style: Style,
    ) -> tuple[ChoiceSpec, ...]:
        n = knobs.num_drawn
        self.check_count(len(prompts) * n)
        specs: list[ChoiceSpec] = []
        for prompt, adapter in zip(prompts, adapters, strict=True):
            max_tokens = self._settle_max_tokens(len(prompt), knobs, style)
            sampling = sampling_params(
                knobs, self.bounds, max_tokens=max_tokens, random=self._random
            )
            for choice in range(n):
                drawn = msgspec.structs.replace(sampling, choice=choice) if choice else sampling
                specs.append(ChoiceSpec(prompt, drawn, options, adapter))
        return tuple(specs)

    def check_count(self, count: int) -> None:
        if count > self._max_choices:
            message = f"prompts times n must not exceed {self._max_choices}, not {count}"
            raise invalid(message, "n")

    def check_scores(
        self, choices: Sequence[ChoiceSpec], knobs: Knobs, *, streamed: bool | None
    ) -> None:
        """One request may ask for only so many logprobs of prompts' tokens, and for fewer if they
        are streamed: they come at once, and must not look like a client that does not read."""
        most = min(self._max_scores, self._max_streamed_scores) if streamed else self._max_scores
        count = sum(choice.num_scores for choice in choices)
        if count > most:
            name = knobs.name("prompt_logprobs")
            how = "can be streamed" if streamed else "one request may ask for"
            message = f"{count} logprobs of prompt tokens are more than the {most} that {how}"
            raise invalid(f"{name}: {message}", name, "too_large")

    def _settle_max_tokens(self, prompt_tokens: int, knobs: Knobs, style: Style) -> int:
        """The request's `max_tokens`: what was asked if it fits, else the API's default."""
        context = self.max_model_len
        capacity = self._registry.fleet.capacity_tokens()
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


def text_options(
    knobs: Knobs,
    include_stop: bool | None,
    skip_special_tokens: bool | None,
    calls: CallOptions | None = None,
    *,
    prompt_only: bool = False,
) -> TextOptions:
    """How the choices of a request become text."""
    return TextOptions(
        stops=stops(knobs),
        include_stop=bool(include_stop),
        skip_special_tokens=skip_special_tokens is not False,
        min_tokens=knobs.min_tokens or 0,
        prompt_only=prompt_only,
        calls=calls,
    )
