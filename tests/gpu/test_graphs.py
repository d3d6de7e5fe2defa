"""What a CUDA graph replays equals what the same step gives without one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.engine.attention.base import AttentionBatch, Span
from tests.gpu.accuracy import BFLOAT16, FLOAT32, assert_close
from tests.gpu.cases import LLAMA_8B, SMOLLM2, TINY, ragged, sized
from tests.gpu.paged import LAYER, LAYERS, Shape, attention_reference, make_sequences
from tests.gpu.test_store import rotated, rotation_rows

GRAPHS = sized(
    [(LLAMA_8B, BFLOAT16, 64, 8192), (SMOLLM2, BFLOAT16, 256, 1024), (SMOLLM2, FLOAT32, 8, 8192)],
    [(TINY, FLOAT32, 4, 24)],
)
"""(shape, dtype, rows that were captured, longest context)"""


def captured(device: torch.device, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """What replays `run`, and where its output then is. Without a GPU it is simply run again."""
    out = run()  # compiles
    if device.type != "cuda":

        def again() -> None:
            out.copy_(run())

        return again, out
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


@pytest.mark.parametrize(("shape", "dtype", "size", "most"), GRAPHS, ids=str)
def test_one_graph_serves_every_smaller_batch(
    shape: Shape, dtype: torch.dtype, size: int, most: int, device: torch.device
) -> None:
    from common.engine.attention.triton_backend import TritonAttention

    contexts = ragged(size, most)
    sequences = make_sequences(shape, contexts, dtype, device)
    windows: tuple[int | None, ...] = (None,) * LAYERS
    backend = TritonAttention(sequences.cache, shape.num_heads, windows)
    slots = torch.full((size,), -1, device=device)
    positions = torch.zeros(size, dtype=torch.int64, device=device)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = torch.randn(size, heads, shape.head_dim, device=device).to(dtype)
    cos, sin = (part.to(dtype) for part in rotation_rows(positions, shape.head_dim))
    buffers = backend.decode_buffers(size, sequences.page_table, slots, positions)
    replay, out = captured(device, lambda: backend.forward(LAYER, qkv, (cos, sin), buffers).clone())
    for count in dict.fromkeys((size, size - 1, size // 2, 1)):
        # The first of the sequences, each at another place: its last token is written anew.
        chosen = torch.randperm(size)[:count].tolist()
        spans = [Span(slot, contexts[slot] - 1, 1) for slot in chosen]
        slots.fill_(-1)[:count] = torch.tensor(chosen, device=device)
        positions.zero_()[:count] = torch.tensor([span.start for span in spans], device=device)
        fresh = torch.randn(size, heads, shape.head_dim, device=device).to(dtype)
        turned = [part.to(dtype) for part in rotation_rows(positions, shape.head_dim)]
        for place, value in zip((qkv, cos, sin), (fresh, *turned), strict=True):
            place.copy_(value)
        batch = AttentionBatch(spans, sequences.page_table, slots, positions)
        backend.plan(batch, into=buffers)
        out.fill_(float("nan"))
        replay()

        eager = AttentionBatch(spans, sequences.page_table, slots[:count], positions[:count])
        again = fresh[:count].clone()
        plain = backend.forward(LAYER, again, (cos[:count], sin[:count]), backend.plan(eager))
        assert torch.equal(out[:count], plain), f"{count} of {size} rows"
        assert not out[count:].count_nonzero(), "padding attends to nothing"
        row = count - 1
        keys, values = sequences.keys[chosen[row]].clone(), sequences.values[chosen[row]].clone()
        first_value = shape.num_heads + shape.num_kv_heads
        query_key = rotated(fresh[row : row + 1], cos[row : row + 1], sin[row : row + 1]).to(dtype)
        keys[-1] = query_key[0, shape.num_heads : first_value]
        values[-1] = fresh[row, first_value:]
        query = query_key[:, : shape.num_heads]
        wanted = attention_reference(query, keys, values, spans[row].start, None)
        assert_close("attention", out[row].view(wanted.shape), wanted)
