"""Drives a `CudaModelRunner` over a late stream as a scheduler does that runs ahead of it."""

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from common.engine.attention.base import AttentionBackend
from common.engine.cuda.runner import CudaModelRunner, CudaStep
from common.engine.loader import LoadedModel
from common.engine.lora.pool import LoraPool
from common.kv_cache.storage import PagedKVCache
from common.plan import Batch, BatchResult, Row, Sample
from tests.late_stream import LateStream
from tests.unit.engine.cuda.doubles import CapturableTorchAttention
from tests.unit.engine.driving import Engine, Generation

SLOTS = 8


class LateEngine(Engine):
    """`Engine`, whose runner does not wait; `ahead` and `settle` leave steps in flight."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        sizes: Sequence[int] = (1, 2, 4, 8),
        page_size: int = 4,
        num_pages: int = 192,
        max_len: int = 256,
        lora: LoraPool | None = None,
        stream: LateStream | None = None,
        max_tokens: int = 2048,
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
            scratch=True,
        )
        self.stream = stream or LateStream()
        self.late = CudaModelRunner(
            loaded, self.cache, self.attention(loaded), self.stream, SLOTS, max_len, lora,
            graph_sizes=sizes, max_tokens=max_tokens, draws=draws,
        )  # fmt: skip
        self.runner = self.late  # type: ignore[assignment]
        self.free = random.Random(7).sample(range(num_pages), num_pages)
        self.in_flight: deque[tuple[CudaStep, list[Generation], list[Row]]] = deque()
        self.drawing: dict[Generation, int] = {}
        self.results: list[BatchResult] = []

    def attention(self, loaded: LoadedModel) -> AttentionBackend[Any]:
        spec = loaded.model.spec
        return CapturableTorchAttention(self.cache, spec.num_heads, spec.windows)

    def ahead(self, *work: tuple[Generation, int]) -> None:
        """Launch a step, then take in the one before it."""
        rows = [self.row_ahead(generation, count) for generation, count in work]
        step = self.late.launch(Batch(tuple(rows)))
        for (generation, count), row in zip(work, rows, strict=True):
            generation.computed += count
            if row.sample_index is not None:
                self.drawing[generation] = self.drawing.get(generation, 0) + 1
        self.in_flight.append((step, [generation for generation, _ in work], rows))
        if len(self.in_flight) > 1:
            self.take_in()

    def row_ahead(self, generation: Generation, count: int) -> Row:
        """`row`, where the last token may be in flight."""
        drawing = self.drawing.get(generation, 0)
        if drawing:
            generation.outputs.append(0)  # its place
        row = self.row(generation, count)
        if not drawing:
            return row
        generation.outputs.pop()
        return Row(
            slot=row.slot,
            start=row.start,
            token_ids=(0,),
            new_pages=row.new_pages,
            sample_index=row.sample_index,
            init=row.init,
            lora_slot=row.lora_slot,
            from_slot=True,
        )

    def take_in(self) -> None:
        step, generations, rows = self.in_flight.popleft()
        result = step.result()
        self.results.append(result)
        for generation, row, sample in zip(generations, rows, result.samples, strict=True):
            assert (sample is None) == (row.sample_index is None)
            if sample is not None:
                assert isinstance(sample, Sample), sample
                self.drawing[generation] -= 1
                generation.samples.append(sample)
                generation.outputs.append(sample.token_id)

    def settle(self) -> None:
        while self.in_flight:
            self.take_in()
