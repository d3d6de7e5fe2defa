"""Drives a `ModelRunner` the way a scheduler does: slots, shuffled pages, chunks, decode rows."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.engine.loader import LoadedModel
from common.engine.lora.pool import LoraPool
from common.engine.runner import ModelRunner
from common.kv_cache.storage import PagedKVCache
from common.messages import SamplingParams
from common.plan import Batch, Row, Sample, SlotInit


def greedy(max_tokens: int = 64, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, **changes)  # type: ignore[arg-type]


@dataclass(eq=False)
class Generation:
    """One request in a slot. `computed` counts tokens whose KV is in its pages."""

    slot: int
    prompt: list[int]
    sampling: SamplingParams
    lora_slot: int | None = None
    outputs: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    introduced: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


class Engine:
    """A runner with its own pool, whose free pages come in shuffled order."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        page_size: int = 4,
        num_pages: int = 192,
        max_len: int = 256,
        lora: LoraPool | None = None,
        draws: bool = True,
    ) -> None:
        spec = loaded.model.spec
        self.page_size = page_size
        self.cache = PagedKVCache(
            num_pages=num_pages,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            page_size=page_size,
            head_dim=spec.head_dim,
            dtype=loaded.dtype,
        )
        self.runner = ModelRunner(
            loaded, self.cache, max_slots=8, max_model_len=max_len, lora=lora, draws=draws
        )
        self.free = random.Random(7).sample(range(num_pages), num_pages)

    def start(
        self,
        slot: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        lora_slot: int | None = None,
    ) -> Generation:
        return Generation(slot, list(prompt), sampling, lora_slot)

    def release(self, generation: Generation) -> None:
        self.free = generation.pages + self.free
        generation.pages = []

    def row(self, generation: Generation, count: int) -> Row:
        """The next `count` tokens of a generation, with the pages they need."""
        start, end = generation.computed, generation.computed + count
        new_pages: list[int] = []
        while (len(generation.pages) + len(new_pages)) * self.page_size < end:
            new_pages.append(self.free.pop())
        known = len(generation.pages) if generation.introduced else 0
        generation.pages += new_pages
        init = None
        if not generation.introduced:
            init = SlotInit(generation.sampling, generation.prompt, tuple(generation.outputs))
            generation.introduced = True
        return Row(
            slot=generation.slot,
            start=start,
            token_ids=generation.tokens[start:end],
            new_pages=generation.pages[known:],
            sample_index=len(generation.outputs) if end == len(generation.tokens) else None,
            init=init,
            lora_slot=generation.lora_slot,
        )

    def step(self, *work: tuple[Generation, int]) -> None:
        """One batch: so many tokens of each generation."""
        rows = tuple(self.row(generation, count) for generation, count in work)
        result = self.runner.launch(Batch(rows)).result()
        for (generation, count), row, sample in zip(work, rows, result.samples, strict=True):
            generation.computed += count
            assert (sample is None) == (row.sample_index is None)
            if sample is not None:
                assert isinstance(sample, Sample), sample
                generation.samples.append(sample)
                generation.outputs.append(sample.token_id)

    def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        chunk: int = 1000,
        slot: int = 0,
        lora_slot: int | None = None,
    ) -> Generation:
        """A whole request alone: chunks of `chunk` tokens, then single tokens."""
        generation = self.start(slot, prompt, sampling, lora_slot)
        while len(generation.outputs) < sampling.max_tokens:
            left = len(generation.tokens) - generation.computed
            self.step((generation, min(chunk, left)))
        return generation
