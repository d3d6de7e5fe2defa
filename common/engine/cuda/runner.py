"""Runs batches on a GPU without waiting for it: the host decides step n+1 while step n computes.

A step, on the runner's own stream: one copy of all its numbers; new pages into the page table, and
cleared; the forward pass (a captured graph where every row is a single token, see `graphs`); draws,
which stay on the device for rows that go on from them (`Row.from_slot`) and are copied to the host.
The host waits once, for the event behind all that, when it is asked for the result.

What a device cannot draw (`common.drawing`) is drawn on the host in `result`; the scheduler has
nothing launched behind such a step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.engine.attention.base import AttentionBackend, AttentionBatch
from common.engine.core import ModelCore, warm_up_batches
from common.engine.cuda.graphs import (
    CapturableAttention,
    DecodeGraphs,
    DecodeInputs,
    known_tokens,
)
from common.engine.cuda.sizes import padded_size, usable_sizes
from common.engine.cuda.staging import NUM_HOST_BUFFERS, Parcel, Staging
from common.engine.cuda.stream import Event, Stream
from common.engine.loader import LoadedModel
from common.engine.lora.pool import LoraPool
from common.engine.page_tables import TableChange
from common.engine.rows import drawing_rows, last_tokens, places, spans_of, token_ids
from common.engine.sampler import Drawn
from common.grammar.store import GrammarStore
from common.kv_cache.storage import PagedKVCache
from common.plan import Batch, BatchResult, Row

ROOM_FOR_PAGES = 8192
"""Numbers of a step that say which new pages its slots have: three a page, so 2730 pages."""

Submitted = Callable[[], None]


@dataclass(eq=False, slots=True)
class CudaStep:
    """A step on its way; `Pending`."""

    runner: "CudaModelRunner"
    rows: Sequence[Row]
    drawing: Sequence[int]
    parcel: Parcel
    event: Event | None = None
    hidden: Tensor | None = None
    """Kept only where a prompt is scored."""
    drawn: Drawn | None = None

    def result(self) -> BatchResult:
        return self.runner.finish(self)


class CudaModelRunner:
    """One model over one page pool, as `ModelRunner`, which says what the scheduler guarantees.

    Besides: at most one other step is not taken in when one is launched, and none that has rows
    which the host draws, or prompts to score.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: PagedKVCache,
        attention: AttentionBackend[Any],
        stream: Stream,
        max_slots: int,
        max_model_len: int,
        lora: LoraPool | None = None,
        grammars: GrammarStore | None = None,
        *,
        draws: bool = True,
        graph_sizes: Sequence[int] = (),
        overlap: bool = True,
        max_tokens: int = 2048,
    ) -> None:
        """`cache` has a scratch page. `graph_sizes`: padded sizes of captured decode steps, for
        which the attention has to be capturable; none: all steps are launched piece by piece.
        `max_tokens`: of a step; one with more takes a few copies more."""
        assert cache.scratch_page is not None, "padding rows need a page"
        sizes = usable_sizes(graph_sizes, max_slots)
        widest = max(sizes, default=0)
        self._stream = stream
        self._in_flight: deque[CudaStep] = deque()
        self._landed: Event | None = None
        with stream.active(), torch.inference_mode():
            self._core = ModelCore(
                model, cache, attention, max_slots, max_model_len, lora, grammars,
                draws=draws, fixed_rows=widest, scratch_page=cache.scratch_page,
            )  # fmt: skip
            self._scratch_slot = max_slots
            self._drawn = torch.zeros(max_slots + 1, dtype=torch.int64, device=cache.device)
            numbers = 4 * max(max_tokens, widest) + 2 * max_slots + ROOM_FOR_PAGES
            self._staging = Staging(stream, cache.device, numbers, max_slots)
            self._graphs: DecodeGraphs | None = None
            self._widest = widest
            if sizes:
                assert isinstance(attention, CapturableAttention)
                inputs = DecodeInputs(*self._staging.numbers[: 4 * widest].view(4, widest))
                self._graphs = DecodeGraphs(
                    self._core, attention, stream, inputs, self._drawn, sizes
                )
        self.overlaps = overlap and self._core.draws_on_device

    @torch.inference_mode()
    def launch(self, batch: Batch) -> CudaStep:
        """Queue one forward pass, and what is drawn from it."""
        rows = batch.rows
        assert rows, "an empty batch is no step"
        assert len(self._in_flight) < NUM_HOST_BUFFERS, "a third step is launched"
        with self._stream.active():
            change = self._core.enter(rows)
        ids = token_ids(rows, self._core.vocab_size)
        step = CudaStep(self, rows, drawing_rows(rows), self._staging.parcel())
        work = self._decode_work(step, ids, change) or self._eager_work(step, ids, change)
        step.event = self._stream.submit(work)
        self._in_flight.append(step)
        return step

    @torch.inference_mode()
    def finish(self, step: CudaStep) -> BatchResult:
        """Wait for a step; `CudaStep.result`."""
        assert step.event is not None
        assert self._in_flight.popleft() is step, "steps are taken in out of order"
        step.event.wait()
        self._landed = step.event
        tokens = None
        if step.drawn is not None and step.drawn.tokens is not None:
            tokens = step.parcel.fetched(len(step.drawing))
        with self._stream.active():
            return self._core.results(step.rows, step.hidden, step.drawn, tokens)

    def fence(self) -> Callable[[], bool]:
        """Asks, on any thread and without blocking, whether all that had been taken in when this
        was called is computed: its pages may be read by others than this device."""
        return _at_once if self._landed is None else self._landed.done

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a small chunk and a decode step and capture the graphs, so that the first request
        finds everything ready.

        Uses page 0 and slot 0: call it before the pool is in use.
        """
        cache = self._core.cache
        if self._graphs is not None:
            self._graphs.warm_up()
        for batch in warm_up_batches(cache.page_size, self._core.max_model_len):
            self.launch(batch).result()

        def clear() -> None:
            cache.tensor[0].zero_()

        self._stream.submit(clear).wait()

    # ------------------------------------------------------------ two kinds of steps

    def _decode_work(self, step: CudaStep, ids: list[int], change: TableChange) -> Submitted | None:
        """Replay a graph; None where these rows are no such step."""
        rows, count = step.rows, len(step.rows)
        graphs = self._graphs
        if graphs is None or not len(ids) == count == len(step.drawing):
            return None
        size = padded_size(graphs.sizes, count)
        if size is None or any(row.prompt_logprobs is not None for row in rows):
            return None
        adapted = any(row.lora_slot is not None for row in rows)
        graph = graphs.prepare(size, adapted=adapted)
        spans = spans_of(rows)
        slots, positions = places(spans, count)
        guessed = [int(row.from_slot) for row in rows]
        padding, put, widest = [0] * (size - count), step.parcel.put, self._widest
        put(ids + padding, widest)
        put(positions + padding, widest)
        slots_there = put(slots + [self._scratch_slot] * len(padding), widest)
        put(guessed + padding, widest)
        changed = self._put_change(step, change)

        def work() -> None:
            step.parcel.send()
            self._core.bring_in(*changed)
            if adapted:
                self._core.plan_lora(rows, size)
            graphs.refill(size, spans)
            graph.replay()
            self._draw(step, graph.output[:count], slots_there[:count])

        return work

    def _eager_work(self, step: CudaStep, ids: list[int], change: TableChange) -> Submitted:
        rows, core, put = step.rows, self._core, step.parcel.put
        spans = spans_of(rows)
        slots, positions = places(spans, len(ids))
        tokens, slots_there, positions_there = put(ids), put(slots), put(positions)
        guessed = None
        if any(row.from_slot for row in rows):
            guessed = put([int(row.from_slot) for row in rows for _ in row.token_ids])
        last = None
        if len(step.drawing) < len(ids):
            last = put(last_tokens(rows, step.drawing))
        drawing_slots = put([rows[number].slot for number in step.drawing])
        changed = self._put_change(step, change)

        def work() -> None:
            step.parcel.send()
            core.bring_in(*changed)
            known = tokens
            if guessed is not None:
                known = known_tokens(tokens, guessed, slots_there, self._drawn)
            batch = AttentionBatch(spans, core.page_table, slots_there, positions_there)
            metadata = core.attention.plan(batch)
            hidden = core.forward(known, positions_there, metadata, core.plan_lora(rows, len(ids)))
            if any(row.prompt_logprobs is not None for row in rows):
                step.hidden = hidden
            if step.drawing:
                ends = hidden if last is None else hidden.index_select(0, last)
                self._draw(step, core.model.logits(ends), drawing_slots)

        return work

    def _put_change(self, step: CudaStep, change: TableChange) -> tuple[Tensor, Tensor, Tensor]:
        put = step.parcel.put
        return put(change.places), put(change.pages), put(change.fresh)

    def _draw(self, step: CudaStep, logits: Tensor, slots: Tensor) -> None:
        """Submitted: draw, remember it for rows that go on from it, and fetch it.

        Ranks that draw nothing are given what the one drew that does: they have the same rows.
        """
        step.drawn = self._core.draw(step.rows, logits)
        tokens = None if step.drawn is None else step.drawn.tokens
        if tokens is not None:
            step.parcel.fetch(tokens)
        group = self._core.model.group
        if group.size > 1 and self.overlaps:
            tokens = torch.zeros_like(slots) if tokens is None else tokens
            group.share_(tokens)
        if tokens is not None:
            self._drawn.index_copy_(0, slots, tokens)


def _at_once() -> bool:
    return True
