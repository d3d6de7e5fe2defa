"""Attention kernels equal float64 attention on real shapes."""

import pytest
import torch
from torch import Tensor

from tests.gpu.accuracy import assert_close
from tests.gpu.cases import DECODE, MIXED, PREFILL, AttentionCase
from tests.gpu.paged import (
    LAYER,
    LAYERS,
    Sequences,
    attention_reference,
    make_sequences,
    random_queries,
)


def attended(case: AttentionCase, query: Tensor, sequences: Sequences) -> Tensor:
    from common.engine.attention.triton_backend import TritonAttention

    windows = tuple(case.window if layer == LAYER else None for layer in range(LAYERS))
    backend = TritonAttention(sequences.cache, case.shape.num_heads, windows)
    metadata = backend.plan(sequences.batch(case.spans))
    out = torch.full_like(query, float("nan")).flatten(1)
    backend.attend(LAYER, query, metadata, out)
    return out.view(query.shape)


@pytest.mark.parametrize("case", [*DECODE, *PREFILL, *MIXED], ids=str)
def test_attention_equals_float64(case: AttentionCase, device: torch.device) -> None:
    contexts = [start + length for start, length in case.spans]
    sequences = make_sequences(case.shape, contexts, case.dtype, device)
    tokens = sum(length for _, length in case.spans)
    query = random_queries(case.shape, tokens, case.dtype, device)

    out = attended(case, query, sequences)

    first = 0
    for slot, (start, length) in enumerate(case.spans):
        rows = slice(first, first + length)
        first += length
        wanted = attention_reference(
            query[rows], sequences.keys[slot], sequences.values[slot], start, case.window
        )
        assert_close("attention", out[rows], wanted)
