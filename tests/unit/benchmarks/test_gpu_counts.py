"""Bytes and operations of the GPU benchmark, beside counting them one by one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.engine import smollm2_shape
from benchmarks.gpu_cells.counts import (
    HeadShape,
    copy_bytes,
    decode_attention_bytes,
    decode_step_bytes,
    decode_step_flops,
    kv_bytes_per_token,
    layer_weights,
    model_weights,
    prefill_attention_flops,
    product_flops,
    step_weights,
    visible_pairs,
)
from benchmarks.gpu_cells.scale import llama_8b_shape, tiny_shape, with_layers
from common.engine.decoder import Weights
from common.engine.spec import ModelSpec
from common.kv_cache.storage import PagedKVCache

windows = st.one_of(st.none(), st.integers(1, 40))


@given(start=st.integers(0, 60), length=st.integers(1, 40), window=windows)
@settings(deadline=None)
def test_pairs_are_those_that_a_mask_leaves(start: int, length: int, window: int | None) -> None:
    counted = sum(
        1
        for query in range(start, start + length)
        for key in range(query + 1)
        if window is None or key > query - window
    )
    assert visible_pairs(start, length, window) == counted


@given(contexts=st.lists(st.integers(1, 50), min_size=1, max_size=4), window=windows)
@settings(deadline=None)
def test_decode_reads_the_keys_and_values_that_it_sees(
    contexts: list[int], window: int | None
) -> None:
    heads = HeadShape(num_heads=6, num_kv_heads=2, head_dim=8)
    seen = sum(visible_pairs(context - 1, 1, window) for context in contexts)
    numbers = seen * 2 * 2 * 8 + len(contexts) * 2 * 6 * 8
    assert decode_attention_bytes(heads, contexts, 2, window) == 2 * numbers


def test_prefill_multiplies_twice_for_each_pair() -> None:
    heads = HeadShape(num_heads=4, num_kv_heads=2, head_dim=16)
    scores = torch.zeros(7, 12)
    visible = torch.ones_like(scores).tril(5).count_nonzero()
    expected = int(visible) * 4 * (2 * 16 + 2 * 16)
    assert prefill_attention_flops(heads, [(5, 7)]) == expected
    assert prefill_attention_flops(heads, [(5, 7), (5, 7)]) == 2 * expected


VARIANTS = {
    "8B": with_layers(llama_8b_shape(), 2),
    "smollm2": with_layers(smollm2_shape(), 2),
    "tiny": tiny_shape(),
    "biases": replace(tiny_shape(), qkv_bias=True, output_bias=True, mlp_bias=True),
    "qk norm": replace(tiny_shape(), qk_norm=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_are_those_of_a_checkpoint(name: str) -> None:
    spec = VARIANTS[name]
    with torch.device("meta"):
        places = Weights.empty(spec, torch.bfloat16).checkpoint_tensors(spec)
    # One vector for all heads is kept once a head in memory, and once in the file.
    numel = {
        key: place[0].numel() if key.endswith(("q_norm.weight", "k_norm.weight")) else place.numel()
        for key, place in places.items()
    }
    assert model_weights(spec) == sum(numel.values())
    first = [size for key, size in numel.items() if key.startswith("model.layers.0.")]
    assert layer_weights(spec) == sum(first)
    unread = 0 if spec.tied_embeddings else numel["model.embed_tokens.weight"]
    assert step_weights(spec) == sum(numel.values()) - unread


def test_an_8b_model_has_eight_billion_weights() -> None:
    assert model_weights(llama_8b_shape()) == 8_030_261_248
    assert kv_bytes_per_token(llama_8b_shape(), 2) == 128 << 10


@pytest.mark.parametrize("spec", [tiny_shape(), smollm2_shape()])
def test_a_token_takes_its_share_of_a_page(spec: ModelSpec) -> None:
    cache = PagedKVCache(
        num_pages=1,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        page_size=4,
        head_dim=spec.head_dim,
        dtype=torch.bfloat16,
    )
    assert 4 * kv_bytes_per_token(spec, 2) == cache.page_bytes


def test_a_decode_step_reads_weights_once_and_each_sequence_s_kv() -> None:
    spec = llama_8b_shape()
    alone = decode_step_bytes(spec, [1000], 2)
    assert alone == 2 * step_weights(spec) + 1000 * kv_bytes_per_token(spec, 2)
    both = decode_step_bytes(spec, [1000, 24], 2)
    assert both - alone == 24 * kv_bytes_per_token(spec, 2)
    sliding = replace(spec, windows=(100,) * 16 + (None,) * 16)
    saved = (1000 - 100) * kv_bytes_per_token(spec, 2) // 2
    assert alone - decode_step_bytes(sliding, [1000], 2) == saved


def test_operations_of_a_step_are_products_and_attention() -> None:
    spec = tiny_shape()
    attention = spec.num_layers * prefill_attention_flops(HeadShape.of(spec), [(8, 1), (2, 1)])
    assert decode_step_flops(spec, [9, 3]) == 2 * 2 * step_weights(spec) + attention


def test_simple_counts() -> None:
    assert product_flops(2, 3, 5) == 60
    assert copy_bytes(7) == 14
