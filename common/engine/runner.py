"""Runs batches on a CPU: owns page tables and sampling state by slot, never sees a request.

A step: reset slots that have new owners, append their new pages, plan attention once, one forward
pass over all rows (chunks and single tokens alike), draw where a row asks for it, and score the
prompt where one does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.attention.base import AttentionBatch
from common.engine.attention.choice import make_attention
from common.engine.core import ModelCore, warm_up_batches
from common.engine.device import AttentionName
from common.engine.loader import LoadedModel
from common.engine.lora.pool import LoraPool
from common.engine.rows import drawing_rows, last_tokens, places, spans_of, token_ids
from common.grammar.store import GrammarStore
from common.kv_cache.storage import PagedKVCache
from common.plan import Batch, BatchResult, Row


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that was computed when it was launched."""

    outcome: BatchResult

    def result(self) -> BatchResult:
        return self.outcome


class ModelRunner:
    """One model over one page pool. Used by one thread.

    The scheduler guarantees what is asserted here: slots below `max_slots`, positions below
    `max_model_len`, token ids inside the vocabulary, pages for every position, `init` in the first
    row of a slot's owner, and rows of only those slots of `lora` that hold their adapter.

    Where ranks share the model one of them `draws` and scores; what the others launch computes the
    same products and gives a result in which nothing was sampled.
    """

    overlaps = False

    def __init__(
        self,
        model: LoadedModel,
        cache: PagedKVCache,
        max_slots: int,
        max_model_len: int,
        lora: LoraPool | None = None,
        grammars: GrammarStore | None = None,
        *,
        attention: AttentionName = "torch",
        draws: bool = True,
    ) -> None:
        spec = model.model.spec
        backend = make_attention(attention, cache, spec.num_heads, spec.windows, model.dtype)
        self._core = ModelCore(
            model, cache, backend, max_slots, max_model_len, lora, grammars, draws=draws
        )
        self._device = cache.device

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Computed:
        """One forward pass; `samples[i]` is what `rows[i]` drew, None where nothing was asked."""
        rows = batch.rows
        assert rows, "an empty batch is no step"
        core = self._core
        change = core.enter(rows)
        if change.pages:
            core.bring_in(*map(self._tensor, (change.places, change.pages, change.fresh)))
        ids = token_ids(rows, core.vocab_size)
        described = self._describe(rows, len(ids))
        hidden = core.forward(
            self._tensor(ids),
            described.positions,
            core.attention.plan(described),
            core.plan_lora(rows, len(ids)),
        )
        drawing = drawing_rows(rows)
        drawn = None
        if drawing:
            drawn = core.draw(rows, core.model.logits(self._last_tokens(hidden, rows, drawing)))
        return Computed(core.results(rows, hidden, drawn))

    def warm_up(self) -> None:
        """Run a small chunk and a decode step, so that the first request finds everything ready.

        Uses page 0 and slot 0: call it before the pool is in use.
        """
        cache = self._core.cache
        for batch in warm_up_batches(cache.page_size, self._core.max_model_len):
            self.launch(batch)
        cache.clear(self._tensor([0]))

    def _describe(self, rows: Sequence[Row], num_tokens: int) -> AttentionBatch:
        assert not any(row.from_slot for row in rows), "this runner is asked one step at a time"
        spans = spans_of(rows)
        slots, positions = places(spans, num_tokens)
        table = self._core.page_table
        return AttentionBatch(spans, table, self._tensor(slots), self._tensor(positions))

    def _last_tokens(self, hidden: Tensor, rows: Sequence[Row], drawing: Sequence[int]) -> Tensor:
        """Of `hidden` [tokens, hidden_size] the last token of each row that draws."""
        if len(drawing) == hidden.shape[0]:
            return hidden
        return hidden.index_select(0, self._tensor(last_tokens(rows, drawing)))

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
