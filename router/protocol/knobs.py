"""How to sample, whatever the API calls it: collected, checked, and made into `SamplingParams`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from common.messages import Grammar, SamplingParams
from router.errors import invalid
from router.tokens import SamplingDefaults

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
_SEED_MASK = (1 << 63) - 1


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """The user's wishes; None and empty mean the default. Named as OpenAI and vLLM do."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    grammar: Grammar | None = None
    """Checked: nodes can compile it."""
    names: Mapping[str, str] = msgspec.field(default_factory=dict)
    """What this API calls a field, where it differs."""

    @property
    def num_drawn(self) -> int:
        """Choices to be drawn for a prompt."""
        return self.best_of or self.n or 1

    @property
    def num_kept(self) -> int | None:
        """The best so many of them are the answer; None where that is all."""
        n = self.n or 1
        return n if n < self.num_drawn else None

    def name(self, knob: str) -> str:
        return self.names.get(knob, knob)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the model and the router's settings allow."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    max_n: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class _Range:
    """A closed or half-open interval."""

    low: float
    high: float = math.inf
    above_low: bool = False

    def __contains__(self, value: float) -> bool:
        low_ok = value > self.low if self.above_low else value >= self.low
        return low_ok and value <= self.high and math.isfinite(value)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'above' if self.above_low else 'at least'} {self.low:g}"
        return f"in {'(' if self.above_low else '['}{self.low:g}, {self.high:g}]"


_RANGES = {
    "max_tokens": _Range(1),
    "min_tokens": _Range(0),
    "temperature": _Range(0),
    "top_p": _Range(0, 1, above_low=True),
    "top_k": _Range(-1),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(0, above_low=True),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "seed": _Range(-(2.0**63), 2.0**64),
}


def check(knobs: Knobs, bounds: Bounds) -> None:
    """Refuse what is out of range.

    Raises:
        ApiError: 400, naming the field.
    """
    for knob, allowed in _RANGES.items():
        value = getattr(knobs, knob)
        if value is not None and value not in allowed:
            name = knobs.name(knob)
            raise invalid(f"{name} must be {allowed}, not {value}", name)
    _check_within(knobs, "n", 1, bounds.max_n)
    _check_within(knobs, "best_of", knobs.n or 1, bounds.max_n)
    _check_within(knobs, "logprobs", 0, bounds.max_logprobs)
    _check_within(knobs, "prompt_logprobs", 0, bounds.max_logprobs)
    _check_order(knobs)
    for token_id in knobs.stop_token_ids or ():
        if not 0 <= token_id < bounds.vocab_size:
            name = knobs.name("stop_token_ids")
            raise invalid(f"{name}: {token_id} is no token of this model", name)
    _check_stops(knobs)


def sampling_params(
    knobs: Knobs, bounds: Bounds, *, max_tokens: int, random: Random
) -> SamplingParams:
    """What nodes are told, from checked knobs. `max_tokens` is what was settled on.

    A grammar's end is the output's end: beside one, `ignore_eos` means nothing.
    """
    defaults = bounds.defaults
    ends = set(knobs.stop_token_ids or ())
    if not knobs.ignore_eos or knobs.grammar is not None:
        ends |= set(bounds.eos_token_ids)
    logprobs = knobs.logprobs
    if logprobs is None and knobs.num_kept is not None:
        logprobs = 0  # the best are chosen by it
    seed = random.getrandbits(63) if knobs.seed is None else knobs.seed & _SEED_MASK
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=_first(knobs.temperature, defaults.temperature, 1.0),
        top_k=max(0, int(_first(knobs.top_k, defaults.top_k, 0))),
        top_p=_first(knobs.top_p, defaults.top_p, 1.0),
        min_p=_first(knobs.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(knobs.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=_first(knobs.presence_penalty, None, 0.0),
        frequency_penalty=_first(knobs.frequency_penalty, None, 0.0),
        logit_bias=_logit_bias(knobs, bounds),
        logprobs=logprobs,
        prompt_logprobs=knobs.prompt_logprobs,
        min_tokens=knobs.min_tokens or 0,
        stop_token_ids=tuple(sorted(ends)),
        grammar=knobs.grammar,
    )


def stops(knobs: Knobs) -> tuple[str, ...]:
    """The stop strings."""
    if knobs.stop is None:
        return ()
    return (knobs.stop,) if isinstance(knobs.stop, str) else tuple(knobs.stop)


def _check_within(knobs: Knobs, knob: str, low: int, high: int) -> None:
    value = getattr(knobs, knob)
    if value is not None and not low <= value <= high:
        name = knobs.name(knob)
        raise invalid(f"{name} must be in [{low}, {high}], not {value}", name)


def _check_order(knobs: Knobs) -> None:
    if knobs.min_tokens and knobs.max_tokens is not None and knobs.min_tokens > knobs.max_tokens:
        name = knobs.name("min_tokens")
        raise invalid(f"{name} must not exceed {knobs.name('max_tokens')}", name)


def _check_stops(knobs: Knobs) -> None:
    strings = stops(knobs)
    name = knobs.name("stop")
    if len(strings) > MAX_STOPS:
        raise invalid(f"{name} takes at most {MAX_STOPS} strings", name)
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            limit = f"1 to {MAX_STOP_CHARACTERS} characters"
            raise invalid(f"{name} takes strings of {limit}", name)


def _logit_bias(knobs: Knobs, bounds: Bounds) -> dict[int, float]:
    """The biases by token id; checked here since the keys are strings in JSON."""
    name = knobs.name("logit_bias")
    found: dict[int, float] = {}
    for key, bias in (knobs.logit_bias or {}).items():
        if not key.isascii() or not key.isdigit() or int(key) >= bounds.vocab_size:
            raise invalid(f"{name}: {key[:32]!r} is no token id of this model", name)
        if not -100 <= bias <= 100:
            raise invalid(f"{name}: a bias must be in [-100, 100], not {bias}", name)
        found[int(key)] = bias
    return found


def _first(wish: float | None, default: float | None, otherwise: float) -> float:
    if wish is not None:
        return wish
    return otherwise if default is None else default
