"""The backend as a whole: mixed steps equal the torch backend and float64, on pages full of NaN."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.attention.base import AttentionBatch, Rotation, Span
from common.engine.attention.torch_backend import TorchAttention
from common.engine.attention.triton_backend import TritonAttention
from common.engine.kernels.tuning import AttentionTuning, DecodeConfig, PrefillConfig, StoreConfig
from common.engine.rope import RopeFrequencies, RopeTable
from common.kv_cache.storage import PagedKVCache
from tests.kernels.paged_scene import Shape, attention64
from tests.kernels.precision import BOUNDS, DEVICE, DTYPES, assert_close, normal
from tests.kernels.shapes import FLOAT32, HEADS

NUM_SLOTS = 4
MAX_LENGTH = 96
TUNING = AttentionTuning(
    prefill=PrefillConfig(block_rows=32, block_keys=32, num_warps=4, num_stages=2, min_keys=32),
    decode=DecodeConfig(block_keys=16, num_warps=4, num_stages=2, min_keys=16, resident=2),
    store=StoreConfig(block_tokens=16),
    processors=4,
)
Step = list[tuple[int, int]]
"""(slot, new tokens), in the order of the batch."""


def make_cache(shape: Shape, fill: float) -> PagedKVCache:
    pages = NUM_SLOTS * -(-MAX_LENGTH // shape.page_size)
    cache = PagedKVCache(
        num_pages=pages,
        num_layers=2,
        num_kv_heads=shape.num_kv_heads,
        page_size=shape.page_size,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        device=DEVICE,
    )
    cache.tensor.fill_(fill)
    return cache


@dataclass
class Oracle:
    """Everything in float64, without pages: of each layer and slot the rotated keys and values."""

    shape: Shape
    windows: tuple[int | None, int | None]
    kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def step(self, layer: int, spans: list[Span], qkv: Tensor, rotation: Rotation) -> Tensor:
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        wide = qkv.double()
        cos, sin = (part.double() for part in rotation)
        rotated = wide * cos + wide.roll(self.shape.head_dim // 2, -1) * sin
        outputs, first = [], 0
        for span in spans:
            last = first + span.length
            new = (
                rotated[first:last, heads : heads + kv_heads].transpose(0, 1),
                wide[first:last, heads + kv_heads :].transpose(0, 1),
            )
            # What a later token reads was rounded when it was stored.
            old = self.kv.get((layer, span.slot))
            keys, values = (part.to(self.shape.dtype).double() for part in new)
            if old is not None:
                keys, values = torch.cat((old[0], keys), 1), torch.cat((old[1], values), 1)
            self.kv[layer, span.slot] = keys, values
            query = rotated[first:last, :heads].to(self.shape.dtype)
            outputs.append(attention64(query, keys, values, span.start, self.windows[layer]))
            first = last
        return torch.cat(outputs) if outputs else wide.new_empty(0, 0)


class Bench:
    """Both backends and the oracle, given the same steps."""

    def __init__(self, shape: Shape, windows: tuple[int | None, int | None]) -> None:
        self.shape = shape
        self.lengths = [0] * NUM_SLOTS
        pages_a_slot = -(-MAX_LENGTH // shape.page_size)
        order = torch.randperm(NUM_SLOTS * pages_a_slot, generator=torch.Generator().manual_seed(3))
        self.page_table = order.view(NUM_SLOTS, pages_a_slot).to(DEVICE)
        inverse = 10000.0 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        self.rope = RopeTable(RopeFrequencies(inverse, 1.0), MAX_LENGTH, shape.dtype)
        self.poisoned = make_cache(shape, float("nan"))
        self.zeroed = make_cache(shape, 0.0)
        self.triton = TritonAttention(self.poisoned, shape.num_heads, windows, shape.dtype, TUNING)
        self.torch = TorchAttention(self.zeroed, shape.num_heads, windows, shape.dtype)
        self.oracle = Oracle(shape, windows)
        self.seed = 0

    def batch(self, step: Step) -> AttentionBatch:
        spans = [Span(slot, self.lengths[slot], new) for slot, new in step]
        positions = [p for span in spans for p in range(span.start, span.start + span.length)]
        slots = [span.slot for span in spans for _ in range(span.length)]
        for slot, new in step:
            self.lengths[slot] += new
        return AttentionBatch(
            spans,
            self.page_table,
            torch.tensor(slots, dtype=torch.int64, device=DEVICE),
            torch.tensor(positions, dtype=torch.int64, device=DEVICE),
        )

    def projection(self, rows: int) -> Tensor:
        self.seed += 1
        heads = self.shape.num_heads + 2 * self.shape.num_kv_heads
        return normal(rows, heads, self.shape.head_dim, dtype=self.shape.dtype, seed=self.seed)

    def step(self, step: Step) -> None:
        batch = self.batch(step)
        rotation = self.rope.at(batch.positions)
        mine, theirs = self.triton.plan(batch), self.torch.plan(batch)
        for layer in range(2):
            qkv = self.projection(len(batch.slots))
            wanted = self.oracle.step(layer, list(batch.spans), qkv, rotation)
            got = self.triton.forward(layer, qkv.clone(), rotation, mine)
            assert_close("attention", got, wanted)
            if self.shape.dtype is torch.float32:
                other = self.torch.forward(layer, qkv.clone(), rotation, theirs)
                assert_close("attention", other, wanted)
        if self.shape.dtype is torch.float32:
            self.check_stored()

    def check_stored(self) -> None:
        """What the kernels wrote is what torch wrote; what torch left zero they left NaN."""
        mine, theirs = self.poisoned.tensor, self.zeroed.tensor
        written = ~mine.isnan()
        assert torch.equal(written, theirs != 0)
        bound = BOUNDS["rope", torch.float32]
        torch.testing.assert_close(
            mine[written], theirs[written], rtol=bound.relative, atol=bound.absolute
        )


@st.composite
def runs(draw: st.DrawFn) -> list[Step]:
    """Steps of chunks and single tokens in any order, none beyond MAX_LENGTH."""
    lengths = [0] * NUM_SLOTS
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, unique=True))
        step = []
        for slot in slots:
            new = draw(st.one_of(st.just(1), st.integers(1, 24)))
            if lengths[slot] + new <= MAX_LENGTH:
                step.append((slot, new))
                lengths[slot] += new
        if step:
            steps.append(step)
    return steps


@settings(max_examples=12, deadline=None)
@given(
    runs(),
    st.sampled_from(HEADS),
    st.sampled_from([4, 16, 6]),
    st.sampled_from([None, 1, 9, 40]),
    st.sampled_from(DTYPES),
)
def test_steps_of_chunks_and_single_tokens(
    run: list[Step],
    heads: tuple[int, int],
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    bench = Bench(Shape(*heads, 16, page_size, dtype), (None, window))
    for step in run:
        bench.step(step)


def test_a_long_sequence_beside_short_ones() -> None:
    bench = Bench(FLOAT32, (None, 20))
    bench.step([(2, 90), (0, 1), (3, 5)])
    bench.step([(0, 1), (2, 1), (1, 1), (3, 1)])


def test_warming_up_touches_no_page() -> None:
    bench = Bench(FLOAT32, (None, 20))
    bench.triton.warm_up()
    assert bench.poisoned.tensor.isnan().all()
    bench.step([(1, 3), (0, 1)])


class TestGraphBuffers:
    """What a captured graph reads keeps its place, whatever the step is."""

    def replay(self, bench: Bench, sizes: list[list[int]], batch_size: int) -> None:
        slots = torch.full((batch_size,), -1, device=DEVICE)
        positions = torch.zeros(batch_size, dtype=torch.int64, device=DEVICE)
        buffers = bench.triton.decode_buffers(batch_size, bench.page_table, slots, positions)
        kept = [
            part.data_ptr()
            for lists in buffers.windows.values()
            for part in (lists.pieces, lists.piece_merges)
            if part is not None
        ]
        for size in sizes:
            batch = bench.batch([(slot, 1) for slot in size])
            rotation = bench.rope.at(batch.positions)
            slots.fill_(-1)[: len(size)] = batch.slots
            positions.zero_()[: len(size)] = batch.positions
            padded = AttentionBatch(batch.spans, bench.page_table, slots, positions)
            assert bench.triton.plan(padded, into=buffers) is buffers
            for layer in range(2):
                qkv = bench.projection(batch_size)
                real = qkv[: len(size)]
                wanted = bench.oracle.step(layer, list(batch.spans), real, rotation)
                got = bench.triton.forward(layer, qkv.clone(), bench.rope.at(positions), buffers)
                if size:
                    assert_close("attention", got[: len(size)], wanted)
                assert not got[len(size) :].any(), "padding attends to nothing"
        now = [
            part.data_ptr()
            for lists in buffers.windows.values()
            for part in (lists.pieces, lists.piece_merges)
            if part is not None
        ]
        assert now == kept

    @pytest.mark.parametrize("window", [None, 12])
    def test_refilled_for_batches_of_any_size(self, window: int | None) -> None:
        bench = Bench(FLOAT32, (None, window))
        bench.step([(0, 60), (1, 3), (3, 16)])
        before = bench.poisoned.tensor.isnan().sum()
        self.replay(bench, [[0, 1, 3], [3], [], [1, 2, 0, 3]], 4)
        written = before - bench.poisoned.tensor.isnan().sum()
        heads = 2 * FLOAT32.num_kv_heads * FLOAT32.head_dim
        assert written == 8 * 2 * heads, "8 tokens were stored, and no padding"

    def test_the_caller_must_fill_the_tensors_that_the_graph_reads(self) -> None:
        bench = Bench(FLOAT32, (None, None))
        table, one = bench.page_table, torch.zeros(2, dtype=torch.int64, device=DEVICE)
        buffers = bench.triton.decode_buffers(2, table, one, one.clone())
        with pytest.raises(AssertionError, match="the graph reads other slots"):
            bench.triton.plan(AttentionBatch([Span(0, 0, 1)], table, one.clone(), one), buffers)
        with pytest.raises(AssertionError, match="a graph computes single tokens"):
            bench.triton.plan(AttentionBatch([Span(0, 0, 2)], table, one, one), buffers)
