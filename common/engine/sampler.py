"""From logits to tokens, doing for each row only what its request asked for.

Order as in vLLM: log probabilities come from the raw logits; then logit_bias and penalties; then
the grammar's mask, so that no bias brings back what it forbids, and min_tokens, which yields where
the grammar allows nothing but the end; then, unless greedy, temperature, min_p, top_k and top_p;
then one draw by inverting the cumulative distribution at a counter-based uniform number (`philox`).
Rows that want nothing but the best token share one argmax. Where there are kernels for it
(`FusedDraws`), so do all rows that want no more than temperature and filters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from common.drawing import drawn_on_device
from common.engine.constraint import Constraint
from common.engine.philox import uniform
from common.grammar.errors import GrammarError
from common.grammar.store import GrammarStore
from common.messages import SamplingParams, TokenLogprob
from common.plan import NotSampled, Sample, SlotInit

GREEDY_TEMPERATURE = 1e-5
"""Below this a temperature means greedy: dividing by it would overflow."""
FIRST_NUCLEUS = 64
"""How many of the best tokens top_p looks at first; eight times as many each further try."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of logits belongs to `slot` and becomes its output token number `index`."""

    slot: int
    index: int


class FusedDraws(Protocol):
    """Draws for a whole batch at once, as `draw` and `uniform` do up to stated rounding."""

    def reset(self, slot: int, params: SamplingParams) -> None:
        """`slot` has a new owner."""
        ...

    def launch(self, logits: Tensor, draws: Sequence[Draw], wanted: Sequence[bool]) -> Tensor:
        """[rows] int64 on the device of `logits` [rows, vocab_size], not waited for. Rows that are
        not `wanted` get any token of the vocabulary."""
        ...


class SlotSampling:
    """How one request samples, with what it has generated as far as its penalties need that."""

    def __init__(
        self,
        init: SlotInit,
        vocab_size: int,
        device: torch.device,
        constraint: Constraint | None = None,
    ) -> None:
        params = init.sampling
        self._constraint = constraint
        self.params = params
        self.greedy = params.temperature < GREEDY_TEMPERATURE
        self._device = device
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[_ids(init.prompt_ids, device)] = True
            self._seen[_ids(init.output_ids, device)] = True
        if params.presence_penalty or params.frequency_penalty:
            outputs = _ids(init.output_ids, device)
            self._counts = torch.bincount(outputs, minlength=vocab_size).float()

    # Made where they are wanted: on a GPU each waits for what was launched before.

    @cached_property
    def _stop_ids(self) -> Tensor:
        return _ids(self.params.stop_token_ids, self._device)

    @cached_property
    def _bias(self) -> tuple[Tensor, Tensor]:
        """Token ids, and what is added to the logits of each."""
        bias = self.params.logit_bias
        return _ids(bias, self._device), torch.tensor(list(bias.values()), device=self._device)

    def plain(self, index: int) -> bool:
        """Whether the row's token is simply the argmax of its logits."""
        return self.greedy and drawn_on_device(self.params, index)

    def _adjusts(self, index: int) -> bool:
        return (
            self._constraint is not None
            or self._seen is not None
            or self._counts is not None
            or bool(self.params.logit_bias)
            or index < self.params.min_tokens
        )

    def adjusted(self, logits: Tensor, index: int) -> Tensor:
        """`logits` [vocab_size] with bias, penalties and masks applied; a copy if anything is.

        Raises:
            GrammarError: no token can be drawn any more.
        """
        if not self._adjusts(index):
            return logits
        logits = logits.clone()
        if self.params.logit_bias:
            logits.index_add_(0, *self._bias)
        if self._seen is not None:
            penalty = self.params.repetition_penalty
            scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(self._seen, scaled, logits)
        if self._counts is not None:
            logits -= self.params.frequency_penalty * self._counts
            logits -= self.params.presence_penalty * (self._counts > 0)
        if self._constraint is not None:
            logits.masked_fill_(self._constraint.forbidden(), -math.inf)
        if index < self.params.min_tokens:
            self._put_off_stops(logits)
        return logits

    def _put_off_stops(self, logits: Tensor) -> None:
        """Take the stop tokens away, unless the grammar has left nothing else."""
        stops = logits[self._stop_ids]
        logits[self._stop_ids] = -math.inf
        if self._constraint is not None and bool(logits.max() == -math.inf):
            logits[self._stop_ids] = stops

    def record(self, token_id: int) -> None:
        """Take a drawn token into the penalties and the grammar."""
        if self._constraint is not None:
            self._constraint.record(token_id)
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's draws, under way on the device; the rest is drawn when they are taken."""

    tokens: Tensor | None
    """[rows] int64: what each row of `fused` draws, any token for the others; None if none is."""
    fused: Sequence[bool]
    logits: Tensor
    draws: Sequence[Draw]
    states: Sequence[SlotSampling]

    def result(self, tokens: Sequence[int] | None = None) -> list[Sample | NotSampled]:
        """Called once, while `logits` still hold. `tokens` are what is in `self.tokens`, if they
        have been read already; else this waits for them."""
        if tokens is None:
            tokens = [] if self.tokens is None else self.tokens.tolist()
        return [
            Sample(tokens[row])
            if self.fused[row]
            else _sample_and_record(self.logits[row].float(), state, draw.index)
            for row, (state, draw) in enumerate(zip(self.states, self.draws, strict=True))
        ]


class Sampler:
    """Sampling state of every slot, and the drawing itself."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarStore | None = None,
        fused: FusedDraws | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars
        self._fused = fused
        self._slots: dict[int, SlotSampling] = {}

    def reset(self, slot: int, init: SlotInit) -> None:
        """`slot` has a new owner."""
        constraint = None
        if init.sampling.grammar is not None:
            assert self._grammars is not None, "a row with a grammar, and nothing to compile it"
            constraint = Constraint(init, self._grammars, self._device)
        self._slots[slot] = SlotSampling(init, self._vocab_size, self._device, constraint)
        if self._fused is not None:
            self._fused.reset(slot, init.sampling)

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> list[Sample | NotSampled]:
        """Draw one token a row; `logits` is [len(draws), vocab_size]."""
        return self.launch(logits, draws).result()

    def launch(self, logits: Tensor, draws: Sequence[Draw]) -> Drawn:
        """The same, without waiting for what the device draws by itself."""
        states = [self._slots[draw.slot] for draw in draws]
        pairs = list(zip(states, draws, strict=True))
        tokens = None
        if self._fused is not None:
            fused = [drawn_on_device(state.params, draw.index) for state, draw in pairs]
            if any(fused):
                tokens = self._fused.launch(logits, draws, fused)
        else:
            fused = [state.plain(draw.index) for state, draw in pairs]
            if any(fused):
                # On a CPU `max` finds the place of a maximum four times as fast as `argmax` does.
                tokens = logits.max(dim=-1).indices
        return Drawn(tokens, fused, logits, draws, states)


def _sample_and_record(raw: Tensor, state: SlotSampling, index: int) -> Sample | NotSampled:
    """What goes wrong with a row's grammar concerns that row."""
    try:
        sample = sample_row(raw, state, index)
    except GrammarError as error:
        return NotSampled(str(error))
    state.record(sample.token_id)
    return sample


def sample_row(raw: Tensor, state: SlotSampling, index: int) -> Sample:
    """Draw from float32 `raw` [vocab_size] with everything the request asked for."""
    params = state.params
    logits = state.adjusted(raw, index)
    if state.greedy:
        token_id = int(logits.argmax())
    else:
        number = uniform(params.seed, params.choice, index)
        token_id = draw(logits / params.temperature, params, number)
    if params.logprobs is None:
        return Sample(token_id)
    return Sample(token_id, token_logprob(raw, token_id, params.logprobs))


def token_logprob(raw: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Log probability of `token_id`, and the `num_top` most probable tokens, best first."""
    normaliser = raw.logsumexp(dim=-1)
    chosen = float(raw[token_id] - normaliser)
    if num_top == 0:
        return TokenLogprob(chosen)
    values, ids = raw.topk(min(num_top, raw.shape[0]))
    return TokenLogprob(
        chosen, tuple(zip(ids.tolist(), (values - normaliser).tolist(), strict=True))
    )


def draw(logits: Tensor, params: SamplingParams, number: float) -> int:
    """The token at quantile `number` of what min_p, top_k and top_p leave of `logits`."""
    values, ids = candidates(logits, params)
    # In float64, as the sum of 10^5 float32 terms would lose the improbable ones.
    cumulative = torch.softmax(values.double(), dim=-1).cumsum(dim=-1)
    position = int(torch.searchsorted(cumulative, number * float(cumulative[-1]), right=True))
    position = min(position, values.shape[0] - 1)
    return position if ids is None else int(ids[position])


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Logits that may be drawn, and their token ids (None: all, in order).

    min_p is relative to the most probable token; top_p's mass is counted after the other two.
    """
    ids: Tensor | None = None
    if 0 < params.top_k < logits.shape[0]:
        logits, ids = logits.topk(params.top_k)
    if params.min_p > 0.0:
        keep = (logits >= logits.max() + math.log(params.min_p)).nonzero().squeeze(-1)
        logits = logits[keep]
        ids = keep if ids is None else ids[keep]
    if params.top_p < 1.0:
        best, order = _nucleus(logits, params.top_p)
        return best, order if ids is None else ids[order]
    return logits, ids


def _nucleus(logits: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest most probable entries whose mass reaches `top_p`, best first.

    Looks at a growing number of the best, as sorting a whole vocabulary costs more than the rest.
    """
    size = logits.shape[0]
    normaliser = logits.logsumexp(dim=-1)
    count = min(FIRST_NUCLEUS, size)
    while True:
        values, order = logits.topk(count)
        mass = (values - normaliser).double().exp().cumsum(dim=-1)
        if count == size or float(mass[-1]) >= top_p:
            break
        count = min(8 * count, size)
    # Keep what begins below the threshold; the first always.
    kept = int((mass[:-1] < top_p).sum()) + 1
    return values[:kept], order[:kept]


def _ids(ids: Sequence[int] | dict[int, float], device: torch.device) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=device)
