"""What every runner is made of: one model, its pages, and each slot's owner.

A runner decides where a step's numbers live and when its kernels run; what is computed from them
is decided here, once for all devices.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.engine.attention.base import AttentionBackend
from common.engine.loader import LoadedModel
from common.engine.lora.base import LoraBatch, LoraPlanner
from common.engine.lora.pool import LoraPool
from common.engine.page_tables import PageTables, TableChange
from common.engine.prompt_logprobs import join_products, prompt_logprobs
from common.engine.rows import adapted_rows, drawing_rows
from common.engine.sampler import Draw, Drawn, Sampler
from common.grammar.store import GrammarStore
from common.kv_cache.storage import PagedKVCache
from common.messages import SamplingParams
from common.plan import Batch, BatchResult, NotSampled, Row, Sample, SlotInit


class ModelCore:
    """One model over one page pool. Used by one thread.

    Where ranks share the model one of them `draws` and scores; the others compute the same products
    and give results in which nothing was sampled.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: PagedKVCache,
        attention: AttentionBackend[Any],
        max_slots: int,
        max_model_len: int,
        lora: LoraPool | None,
        grammars: GrammarStore | None,
        *,
        draws: bool,
        fixed_rows: int = 0,
        scratch_page: int | None = None,
    ) -> None:
        """`fixed_rows` as in `Ops.lora_planner`. With a `scratch_page` there is a slot more, behind
        the others, all of whose pages are that one."""
        spec = model.model.spec
        held = (cache.num_layers, cache.num_kv_heads, cache.head_dim, cache.dtype)
        assert held == (spec.num_layers, spec.num_kv_heads, spec.head_dim, model.dtype), (
            f"the page pool {held} was not made for this model"
        )
        self.model = model.model
        self.cache = cache
        self.attention = attention
        self.vocab_size = spec.vocab_size
        self.max_model_len = max_model_len
        self.tables = PageTables(max_slots, max_model_len, cache.page_size, cache.num_pages)
        fused = self.model.ops.fused_draws(spec.vocab_size)
        self.draws_on_device = fused is not None
        """Whether what `common.drawing` says of a device is true of this one, or, where only one
        rank draws, of that one's."""
        self._sampler: Sampler | None = None
        if draws:
            self._sampler = Sampler(spec.vocab_size, cache.device, grammars, fused)
        self._lora = lora
        self._fixed_rows = fixed_rows
        self._adapters: LoraPlanner | None = None
        num_slots = max_slots + (scratch_page is not None)
        self.page_table = torch.zeros(
            (num_slots, self.tables.width), dtype=torch.int64, device=cache.device
        )
        """[slots, pages] int64."""
        if scratch_page is not None:
            self.page_table[max_slots] = scratch_page
        self._rope = self.model.rope_table(max_model_len)

    def enter(self, rows: Sequence[Row]) -> TableChange:
        """Slots forget their former owners; what the page table is to learn comes back."""
        if self._sampler is not None:
            for row in rows:
                if row.init is not None:
                    self._sampler.reset(row.slot, row.init)
        return self.tables.enter(rows)

    def bring_in(self, places: Tensor, pages: Tensor, fresh: Tensor) -> None:
        """Carry out a `TableChange`, whose lists these are, each [n] int64."""
        if len(places):
            self.page_table.view(-1).index_copy_(0, places, pages)
        if len(fresh):
            self.cache.clear(fresh)

    def forward(
        self, token_ids: Tensor, positions: Tensor, metadata: Any, lora: LoraBatch | None
    ) -> Tensor:
        """Hidden states [tokens, hidden_size] of `token_ids` at `positions`, both [tokens] int64;
        `metadata` is the attention's plan of them."""
        rotation = self._rope.at(positions)
        return self.model.forward(token_ids, rotation, self.attention, metadata, lora)

    def plan_lora(self, rows: Sequence[Row], num_tokens: int) -> LoraBatch | None:
        """What the rows need of adapters; None where none of them has one."""
        adapted = adapted_rows(rows)
        if not adapted:
            return None
        return self.lora_planner().plan(adapted, num_tokens)

    def lora_planner(self) -> LoraPlanner:
        """Made for the first batch with an adapter."""
        if self._adapters is None:
            assert self._lora is not None, "a row with an adapter, and no pool of them"
            self._adapters = self.model.ops.lora_planner(self._lora, self._fixed_rows)
        return self._adapters

    def draw(self, rows: Sequence[Row], logits: Tensor) -> Drawn | None:
        """Begin to draw for the rows that want it, from `logits` [those rows, vocab_size]."""
        if self._sampler is None:
            return None
        draws = [Draw(row.slot, row.sample_index) for row in rows if row.sample_index is not None]
        return self._sampler.launch(logits, draws)

    def results(
        self,
        rows: Sequence[Row],
        hidden: Tensor | None,
        drawn: Drawn | None,
        tokens: Sequence[int] | None = None,
    ) -> BatchResult:
        """What was drawn, with the rest drawn here, and prompts scored from `hidden` [tokens,
        hidden_size], which may be None where no row wants that. `tokens` as in `Drawn.result`."""
        samples: list[Sample | NotSampled | None] = [None] * len(rows)
        if self._sampler is None:
            if hidden is not None:
                join_products(rows, hidden, self.model.logits)
            return BatchResult(tuple(samples))
        if drawn is not None:
            for number, sample in zip(drawing_rows(rows), drawn.result(tokens), strict=True):
                samples[number] = sample
        scores = () if hidden is None else prompt_logprobs(rows, hidden, self.model.logits)
        return BatchResult(tuple(samples), scores)


def warm_up_batches(page_size: int, max_model_len: int) -> list[Batch]:
    """A small chunk that draws at random, the same that takes the best token, and a decode step, on
    page 0 and in slot 0. The two draws are different kernels."""
    longest = min(page_size, max_model_len)
    prompt = [0] * max(1, longest - 1)
    inits = [
        SlotInit(SamplingParams(max_tokens=1, seed=0, temperature=temperature), prompt, [])
        for temperature in (1.0, 0.0)
    ]
    batches = [Batch((Row(0, 0, prompt, [0], 0, init),)) for init in inits]
    if len(prompt) < longest:
        batches.append(Batch((Row(0, len(prompt), [0], [], 1),)))
    return batches
