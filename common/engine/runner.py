"""Runs batches: owns page tables and sampling state by slot, never sees a request.

A step: reset slots that have new owners, append their new pages, plan attention once, one forward
pass over all rows (chunks and single tokens alike), draw where a row asks for it, and score the
prompt where one does.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from common.engine.attention.base import AttentionBatch, Span
from common.engine.attention.torch_backend import TorchAttention
from common.engine.loader import LoadedModel
from common.engine.lora.base import LoraBatch, LoraPlanner, LoraRows
from common.engine.lora.pool import LoraPool
from common.engine.prompt_logprobs import join_products, prompt_logprobs
from common.engine.sampler import Draw, Sampler
from common.grammar.store import GrammarStore
from common.kv_cache.storage import PagedKVCache
from common.messages import SamplingParams
from common.plan import Batch, BatchResult, NotSampled, Row, Sample, SlotInit


class ModelRunner:
    """One model over one page pool. Used by one thread.

    The scheduler guarantees what is asserted here: slots below `max_slots`, positions below
    `max_model_len`, token ids inside the vocabulary, pages for every position, `init` in the first
    row of a slot's owner, and rows of only those slots of `lora` that hold their adapter.

    Where ranks share the model one of them `draws` and scores; the others' `run` computes the same
    products and gives a result in which nothing was sampled.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: PagedKVCache,
        max_slots: int,
        max_model_len: int,
        lora: LoraPool | None = None,
        grammars: GrammarStore | None = None,
        *,
        draws: bool = True,
    ) -> None:
        spec = model.model.spec
        held = (cache.num_layers, cache.num_kv_heads, cache.head_dim, cache.dtype)
        assert held == (spec.num_layers, spec.num_kv_heads, spec.head_dim, model.dtype), (
            f"the page pool {held} was not made for this model"
        )
        self._model = model.model
        self._lora = lora
        self._adapters: LoraPlanner | None = None
        self._vocab_size = spec.vocab_size
        self._cache = cache
        self._max_model_len = max_model_len
        device = cache.device
        self._device = device
        max_pages = -(-max_model_len // cache.page_size)
        self._page_table = torch.zeros((max_slots, max_pages), dtype=torch.int64, device=device)
        self._num_pages = [0] * max_slots
        self._attention = TorchAttention(cache, spec.num_heads, spec.windows, model.dtype)
        self._rope = model.model.rope_table(max_model_len)
        self._sampler: Sampler | None = None
        if draws:
            fused = model.model.ops.fused_draws(spec.vocab_size)
            self._sampler = Sampler(spec.vocab_size, device, grammars, fused)

    @torch.inference_mode()
    def run(self, batch: Batch) -> BatchResult:
        """One forward pass; `samples[i]` is what `rows[i]` drew, None where nothing was asked."""
        rows = batch.rows
        assert rows, "an empty batch is no step"
        self._update_slots(rows)
        token_ids = list(chain.from_iterable(row.token_ids for row in rows))
        assert min(token_ids) >= 0, "negative token id"
        assert max(token_ids) < self._vocab_size, "token id outside the vocabulary"
        plan = self._describe(rows, len(token_ids))
        drawing = [number for number, row in enumerate(rows) if row.sample_index is not None]
        hidden = self._model.forward(
            self._tensor(token_ids),
            self._rope.at(plan.positions),
            self._attention,
            self._attention.plan(plan),
            self._plan_lora(rows),
        )
        samples: list[Sample | NotSampled | None] = [None] * len(rows)
        draws = [Draw(row.slot, row.sample_index) for row in rows if row.sample_index is not None]
        if draws:
            logits = self._model.logits(self._last_tokens(hidden, rows, drawing))
            if self._sampler is not None:
                drawn = self._sampler.sample(logits, draws)
                for number, sample in zip(drawing, drawn, strict=True):
                    samples[number] = sample
        if self._sampler is None:
            join_products(rows, hidden, self._model.logits)
            return BatchResult(tuple(samples))
        return BatchResult(tuple(samples), prompt_logprobs(rows, hidden, self._model.logits))

    def warm_up(self) -> None:
        """Run a small chunk and a decode step, so that the first request finds everything ready.

        Uses page 0 and slot 0: call it before the pool is in use.
        """
        size = self._cache.page_size
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        prompt = [0] * max(1, min(size, self._max_model_len) - 1)
        init = SlotInit(sampling, prompt, [])
        self.run(Batch((Row(0, 0, prompt, [0], 0, init),)))
        if len(prompt) < min(size, self._max_model_len):
            self.run(Batch((Row(0, len(prompt), [0], [], 1),)))
        self._cache.clear(self._tensor([0]))

    # ------------------------------------------------------------ slots and pages

    def _update_slots(self, rows: Sequence[Row]) -> None:
        fresh: list[int] = []
        for row in rows:
            end = row.start + len(row.token_ids)
            assert row.token_ids, "a row computes at least one token"
            assert end <= self._max_model_len, f"position {end - 1} is beyond the model's length"
            if row.init is not None:
                self._num_pages[row.slot] = 0
                if self._sampler is not None:
                    self._sampler.reset(row.slot, row.init)
            if row.new_pages:
                fresh += self._append_pages(row)
            assert end <= self._num_pages[row.slot] * self._cache.page_size, (
                f"slot {row.slot} has no page for position {end - 1}"
            )
        if fresh:
            # Masked keys and values still enter the arithmetic, and 0 * NaN is NaN: whatever a
            # page's earlier owner left must not reach the tail of its new one.
            self._cache.clear(self._tensor(fresh))

    def _append_pages(self, row: Row) -> Sequence[int]:
        """Returns those of the row's new pages that hold nothing computed before."""
        count = self._num_pages[row.slot]
        total = count + len(row.new_pages)
        assert total <= self._page_table.shape[1], f"slot {row.slot} holds {total} pages"
        pages = self._tensor(row.new_pages)
        assert min(row.new_pages) >= 0, "negative page id"
        assert max(row.new_pages) < self._cache.num_pages, "page id outside the pool"
        self._page_table[row.slot, count:total] = pages
        self._num_pages[row.slot] = total
        used = -(-row.start // self._cache.page_size)
        return row.new_pages[max(0, used - count) :]

    # ------------------------------------------------------------ batch description

    def _describe(self, rows: Sequence[Row], num_tokens: int) -> AttentionBatch:
        spans = [Span(row.slot, row.start, len(row.token_ids)) for row in rows]
        if num_tokens == len(rows):
            slots = [span.slot for span in spans]
            positions = [span.start for span in spans]
        else:
            slots = [span.slot for span in spans for _ in range(span.length)]
            positions = [
                position
                for span in spans
                for position in range(span.start, span.start + span.length)
            ]
        return AttentionBatch(spans, self._page_table, self._tensor(slots), self._tensor(positions))

    def _plan_lora(self, rows: Sequence[Row]) -> LoraBatch | None:
        adapted = []
        first = 0
        for row in rows:
            if row.lora_slot is not None:
                adapted.append(LoraRows(row.lora_slot, first, len(row.token_ids)))
            first += len(row.token_ids)
        if not adapted:
            return None
        if self._adapters is None:
            assert self._lora is not None, "a row with an adapter, and no pool of them"
            self._adapters = self._model.ops.lora_planner(self._lora)
        return self._adapters.plan(adapted, first)

    def _last_tokens(self, hidden: Tensor, rows: Sequence[Row], drawing: Sequence[int]) -> Tensor:
        """Of `hidden` [tokens, hidden_size] the last token of each row that draws."""
        if len(drawing) == hidden.shape[0]:
            return hidden
        ends = []
        end = 0
        for row in rows:
            end += len(row.token_ids)
            ends.append(end)
        return hidden.index_select(0, self._tensor([ends[number] - 1 for number in drawing]))

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
