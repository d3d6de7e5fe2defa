"""How many bytes and operations a piece of work needs at the least. Pure arithmetic.

Each input counts as read once and each output as written once; a multiply-add is two operations.
What an implementation moves beyond that (partial results of split contexts, page tables,
activations between kernels) is its overhead, and so is not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, spec: ModelSpec) -> "HeadShape":
        return cls(spec.num_heads, spec.num_kv_heads, spec.head_dim)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


def visible_pairs(start: int, length: int, window: int | None = None) -> int:
    """(query, key) pairs of new tokens at positions [start, start + length): each sees itself and
    what is before it, `window` positions at most."""
    if window is None:
        return length * start + length * (length + 1) // 2
    full = max(0, min(length, window - start))
    """The first so many see everything before them."""
    return full * start + full * (full + 1) // 2 + (length - full) * window


def decode_attention_bytes(
    heads: HeadShape, contexts: Sequence[int], itemsize: int, window: int | None = None
) -> int:
    """One layer, one new token a sequence: keys and values that it sees, query in, output out.

    `contexts` are lengths with the new token in them.
    """
    seen = sum(c if window is None else min(c, window) for c in contexts)
    keys_values = 2 * heads.num_kv_heads * heads.head_dim * seen
    query_output = 2 * heads.num_heads * heads.head_dim * len(contexts)
    return (keys_values + query_output) * itemsize


def prefill_attention_flops(
    heads: HeadShape, chunks: Sequence[tuple[int, int]], window: int | None = None
) -> int:
    """One layer; `chunks` are (start, length) of each sequence's new tokens. Scores and the
    weighted sum of values take two operations each for every pair, head and dimension."""
    pairs = sum(visible_pairs(start, length, window) for start, length in chunks)
    return 4 * heads.num_heads * heads.head_dim * pairs


def kv_bytes_per_token(spec: ModelSpec, itemsize: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize


def layer_weights(spec: ModelSpec) -> int:
    """Numbers in one layer's matrices, biases and norms."""
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    fused = query + 2 * kv
    count = hidden * fused + hidden * query + 3 * hidden * inner + 2 * hidden
    if spec.qkv_bias:
        count += fused
    if spec.output_bias:
        count += hidden
    if spec.mlp_bias:
        count += 2 * inner + hidden
    if spec.qk_norm:
        count += 2 * spec.head_dim
    return count


def step_weights(spec: ModelSpec) -> int:
    """Numbers that every forward pass which draws a token reads: all layers, the last norm and the
    head. Of an embedding that is not the head only single rows are read."""
    head = spec.vocab_size * spec.hidden_size
    return spec.num_layers * layer_weights(spec) + spec.hidden_size + head


def model_weights(spec: ModelSpec) -> int:
    """Numbers in the whole checkpoint."""
    embedding = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    return step_weights(spec) + embedding


def decode_step_bytes(spec: ModelSpec, contexts: Sequence[int], itemsize: int) -> int:
    """One decode step: the weights once, and of each sequence the KV that it sees.

    `contexts` are lengths with the new token in them. All layers are taken to see everything
    unless their window is shorter.
    """
    total = step_weights(spec)
    for window in spec.windows:
        seen = sum(c if window is None else min(c, window) for c in contexts)
        total += 2 * spec.num_kv_heads * spec.head_dim * seen
    return total * itemsize


def decode_step_flops(spec: ModelSpec, contexts: Sequence[int]) -> int:
    """Operations of the same step."""
    heads = HeadShape.of(spec)
    flops = 2 * len(contexts) * step_weights(spec)
    for window in spec.windows:
        flops += prefill_attention_flops(heads, [(c - 1, 1) for c in contexts], window)
    return flops


def product_flops(rows: int, inner: int, columns: int) -> int:
    """Of a matrix product [rows, inner] x [inner, columns]."""
    return 2 * rows * inner * columns


def copy_bytes(size: int) -> int:
    """Moved by a copy of `size` bytes inside one memory: read and written."""
    return 2 * size
