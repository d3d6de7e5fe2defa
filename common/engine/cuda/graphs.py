"""Decode steps as captured graphs, one for each padded batch size.

    rows       0 ... n-1   n ... size-1
    slots      theirs      the scratch slot, whose pages are all the scratch page
    positions  theirs      0

Padding rows are computed like the others: they write to the scratch page, which nobody is ever
given, and attend to nobody's pages. What they draw is not looked at.

A batch with adapters needs other launches than one without, so those are captured apart, when the
first such batch of a size comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from common.engine.attention.base import AttentionBackend, AttentionBatch, Span
from common.engine.core import ModelCore
from common.engine.cuda.stream import Graph, Stream

Metadata = TypeVar("Metadata")


@runtime_checkable
class CapturableAttention(AttentionBackend[Metadata], Protocol[Metadata]):
    """One whose metadata for single tokens can keep its tensors from step to step."""

    def warm_up(self) -> None:
        """Have ready whatever a step may launch. May block, for minutes the first time."""
        ...

    def decode_buffers(
        self, batch_size: int, page_table: Tensor, slots: Tensor, positions: Tensor
    ) -> Metadata:
        """Metadata for any step of up to `batch_size` single tokens. The three tensors are read by
        whatever is captured with it; `slots` and `positions` are [batch_size]."""
        ...

    def plan(self, batch: AttentionBatch, into: Metadata | None = None) -> Metadata:
        """With `into`, made by `decode_buffers`, refill that, on the stream, and give it back. Rows
        beyond the spans of `batch` are padding."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A decode step's numbers on the device, always at the same place: [largest size] each."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    guessed: Tensor
    """1 where the token is what the slot drew last."""

    def first(self, count: int) -> "DecodeInputs":
        return DecodeInputs(
            self.token_ids[:count],
            self.positions[:count],
            self.slots[:count],
            self.guessed[:count],
        )


def known_tokens(token_ids: Tensor, guessed: Tensor, slots: Tensor, drawn: Tensor) -> Tensor:
    """`token_ids`, but what its slot drew last for each token that is `guessed`; all [tokens].

    `drawn` [slots] int64.
    """
    return torch.where(guessed.bool(), drawn.index_select(0, slots), token_ids)


class DecodeGraphs:
    """Captures and replays; `sizes` are in order, the largest is that of `inputs`."""

    def __init__(
        self,
        core: ModelCore,
        attention: CapturableAttention[Any],
        stream: Stream,
        inputs: DecodeInputs,
        drawn: Tensor,
        sizes: Sequence[int],
    ) -> None:
        """`drawn` [slots] int64: what each slot drew last."""
        self.sizes = tuple(sizes)
        self._core = core
        self._attention = attention
        self._stream = stream
        self._drawn = drawn
        self._inputs = {size: inputs.first(size) for size in sizes}
        # The largest first: smaller ones then use its memory.
        self._metadata = {
            size: attention.decode_buffers(
                size, core.page_table, self._inputs[size].slots, self._inputs[size].positions
            )
            for size in reversed(sizes)
        }
        self._captured: dict[tuple[int, bool], Graph] = {}

    def warm_up(self) -> None:
        """Capture every size, the largest first, so that smaller ones find what they need; those
        with adapters are left until they are wanted."""
        with self._stream.active():
            self._attention.warm_up()
        for size in reversed(self.sizes):
            self.prepare(size, adapted=False)

    def prepare(self, size: int, *, adapted: bool) -> Graph:
        """The step of this size, captured if it has not been; may block then. Its output are the
        logits [size, vocab_size]."""
        graph = self._captured.get((size, adapted))
        if graph is None:
            graph = self._captured[size, adapted] = self._capture(size, adapted)
        return graph

    def refill(self, size: int, spans: Sequence[Span]) -> None:
        """Tell the attention which rows the next replay has. To be submitted."""
        inputs = self._inputs[size]
        batch = AttentionBatch(spans, self._core.page_table, inputs.slots, inputs.positions)
        self._attention.plan(batch, into=self._metadata[size])

    def _capture(self, size: int, adapted: bool) -> Graph:
        core, inputs, metadata = self._core, self._inputs[size], self._metadata[size]
        with self._stream.active():
            lora = core.lora_planner().plan([], size) if adapted else None

        def compute() -> Tensor:
            tokens = known_tokens(inputs.token_ids, inputs.guessed, inputs.slots, self._drawn)
            hidden = core.forward(tokens, inputs.positions, metadata, lora)
            return core.model.logits(hidden)

        # What an earlier step left in the inputs must not be computed again: its tokens are known
        # by now, so other ones would be taken for them.
        self._stream.submit(lambda: self._blank(size))
        return self._stream.capture(compute)

    def _blank(self, size: int) -> None:
        inputs = self._inputs[size]
        for numbers in (inputs.token_ids, inputs.positions, inputs.guessed):
            numbers.zero_()
        inputs.slots.fill_(self._core.page_table.shape[0] - 1)
        self.refill(size, ())
