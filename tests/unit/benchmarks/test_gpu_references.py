"""What the tests on a GPU compare with: their references, and the comparison itself."""

import pytest
import torch

from common.engine.attention.torch_backend import TorchAttention
from tests.gpu.accuracy import BOUNDS, WIDTH, assert_close, errors
from tests.gpu.paged import (
    LAYER,
    LAYERS,
    Shape,
    attention_reference,
    make_sequences,
    random_queries,
)

CPU = torch.device("cpu")
SHAPE = Shape(num_heads=6, num_kv_heads=2, head_dim=16, page_size=4)


@pytest.mark.parametrize("window", [None, 5])
def test_the_attention_reference_equals_the_torch_backend(window: int | None) -> None:
    spans = ((0, 9), (12, 1), (3, 150), (0, 1))
    contexts = [start + length for start, length in spans]
    sequences = make_sequences(SHAPE, contexts, torch.float32, CPU)
    # The runner leaves no page dirty for this backend.
    sequences.cache.tensor.nan_to_num_(0.0)
    query = random_queries(SHAPE, sum(length for _, length in spans), torch.float32, CPU)
    new = [slice(start, start + length) for start, length in spans]
    keys = torch.cat([k[part] for k, part in zip(sequences.keys, new, strict=True)])
    values = torch.cat([v[part] for v, part in zip(sequences.values, new, strict=True)])
    qkv = torch.cat((query, keys, values), dim=1)
    unturned = torch.ones(len(qkv), 1, 16), torch.zeros(len(qkv), 1, 16)
    windows = tuple(window if layer == LAYER else None for layer in range(LAYERS))
    backend = TorchAttention(sequences.cache, SHAPE.num_heads, windows, torch.float32)

    out = backend.forward(LAYER, qkv, unturned, backend.plan(sequences.batch(spans)))

    first = 0
    for slot, (start, length) in enumerate(spans):
        rows = slice(first, first + length)
        first += length
        wanted = attention_reference(
            query[rows], sequences.keys[slot], sequences.values[slot], start, window
        )
        assert_close("attention", out[rows].view(wanted.shape), wanted)


def test_sequences_are_poisoned_all_around() -> None:
    sequences = make_sequences(SHAPE, [9, 4], torch.float32, CPU)
    tensor = sequences.cache.tensor
    assert tensor[:, LAYER + 1].isnan().all()
    assert tensor[:, LAYER - 1].isnan().all()
    last = tensor[sequences.page_table[0, 2], LAYER]
    assert last[:, :, 1:].isnan().all()
    assert torch.equal(last[0, :, 0], sequences.keys[0][8])
    places = 2 * 2  # of a token: keys and values, KV heads
    spare = 2 * 4 + 3
    assert int(tensor[:, LAYER].isnan().all(-1).sum()) == spare * places


def test_errors_are_relative_to_each_vector() -> None:
    wanted = torch.ones(2, WIDTH + 3, dtype=torch.float64)
    got = wanted.clone()
    assert errors(got, wanted).tolist() == [0.0] * 4
    got[1, WIDTH:] = 1.5
    assert errors(got, wanted).tolist() == [0.0, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_alone_is_within_every_bound_and_mistakes_are_not(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(64, 8, WIDTH, generator=generator, dtype=torch.float64) * 1e-3
    rounded = wanted.to(dtype)
    for kernel in {kernel for kernel, _ in BOUNDS}:
        assert_close(kernel, rounded, wanted)
        for mistake in ("nan", "one number", "swapped heads", "scaled", "zero"):
            wrong = rounded.clone()
            match mistake:
                case "nan":
                    wrong[5, 3, 7] = float("nan")
                case "one number":
                    wrong[5, 3, 7] = -wrong[5, 3, 7] - 1e-3
                case "swapped heads":
                    wrong[5, 3], wrong[5, 4] = rounded[5, 4], rounded[5, 3]
                case "scaled":
                    wrong[5, 3] *= 1.03
                case "zero":
                    wrong[5, 3] = 0
            with pytest.raises(AssertionError, match="vectors are off"):
                assert_close(kernel, wrong, wanted)


def test_a_vector_of_zeros_is_met_exactly_or_not_at_all() -> None:
    zeros = torch.zeros(1, 8, dtype=torch.float64)
    assert_close("norm", zeros.float(), zeros)
    with pytest.raises(AssertionError):
        assert_close("norm", zeros.float() + 1e-30, zeros)
