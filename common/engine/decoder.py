"""The decoder that Llama, SmolLM2, Mistral, Qwen2 and Qwen3 share, written for inference.

Query, key and value are one product and so are gate and up. Weights are plain tensors;
`checkpoint_tensors` maps the names in a checkpoint onto (views of) them, so loading fills the
fused weights in place.

Several ranks may share a model (`common.engine.parallel`): then the spec, the weights and what goes
between two sums are this rank's, while hidden states and logits are everybody's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.attention.base import AttentionBackend, Metadata, Rotation
from common.engine.linear import Linear, LinearFactory
from common.engine.lora.base import LoraBatch
from common.engine.lora.targets import Product
from common.engine.ops import Ops, TorchOps
from common.engine.parallel.group import ALONE, Group
from common.engine.rope import RopeFrequencies, RopeTable
from common.engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; [out, in] matrices, biases None where the model has none."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[num_heads + num_kv_heads, head_dim]: the query norm's weight, then the key norm's."""
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """The embedding itself, or this rank's rows of it, if the model ties them."""

    @classmethod
    def empty(
        cls,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device | None = None,
        vocab: range | None = None,
    ) -> "Weights":
        """Uninitialised tensors of the right shapes, on the CPU if not told otherwise; `vocab` are
        the head's rows if not all."""

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        hidden, inner = spec.hidden_size, spec.intermediate_size
        query = spec.num_heads * spec.head_dim
        qk_heads = spec.num_heads + spec.num_kv_heads
        fused = query + 2 * spec.num_kv_heads * spec.head_dim
        embedding = new(spec.vocab_size, hidden)
        layers = tuple(
            LayerWeights(
                input_norm=new(hidden),
                qkv=new(fused, hidden),
                qkv_bias=new(fused) if spec.qkv_bias else None,
                qk_norm=new(qk_heads, spec.head_dim) if spec.qk_norm else None,
                output=new(hidden, query),
                output_bias=new(hidden) if spec.output_bias else None,
                mlp_norm=new(hidden),
                gate_up=new(2 * inner, hidden),
                gate_up_bias=new(2 * inner) if spec.mlp_bias else None,
                down=new(hidden, inner),
                down_bias=new(hidden) if spec.mlp_bias else None,
            )
            for _ in range(spec.num_layers)
        )
        rows = range(spec.vocab_size) if vocab is None else vocab
        tied = embedding[rows.start : rows.stop]
        head = tied if spec.tied_embeddings else new(len(rows), hidden)
        return cls(embedding, layers, new(hidden), head)

    def checkpoint_tensors(self, spec: ModelSpec) -> dict[str, Tensor]:
        """Every name a checkpoint of this model must hold, with where its values go.

        A query or key norm is one vector for all heads: its place is [heads, head_dim] here, and
        the loader lets it broadcast.
        """
        places = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not spec.tied_embeddings:
            places["lm_head.weight"] = self.head
        for number, layer in enumerate(self.layers):
            for name, place in _layer_places(layer, spec).items():
                places[f"model.layers.{number}.{name}"] = place
        return places


def _layer_places(layer: LayerWeights, spec: ModelSpec) -> dict[str, Tensor]:
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    places = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.mlp_norm,
    }

    def add(prefix: str, names: list[str], sizes: list[int], *parts: Tensor | None) -> None:
        for suffix, fused in zip(("weight", "bias"), parts, strict=True):
            if fused is not None:
                for name, piece in zip(names, torch.split(fused, sizes), strict=True):
                    places[f"{prefix}.{name}.{suffix}"] = piece

    hidden, inner = spec.hidden_size, spec.intermediate_size
    qkv = ["q_proj", "k_proj", "v_proj"]
    add("self_attn", qkv, [query, kv, kv], layer.qkv, layer.qkv_bias)
    add("self_attn", ["o_proj"], [hidden], layer.output, layer.output_bias)
    add("mlp", ["gate_proj", "up_proj"], [inner, inner], layer.gate_up, layer.gate_up_bias)
    add("mlp", ["down_proj"], [hidden], layer.down, layer.down_bias)
    if layer.qk_norm is not None:
        places["self_attn.q_norm.weight"] = layer.qk_norm[: spec.num_heads]
        places["self_attn.k_norm.weight"] = layer.qk_norm[spec.num_heads :]
    return places


class Layer:
    """One decoder layer over `LayerWeights` that hold their final values."""

    def __init__(
        self,
        number: int,
        spec: ModelSpec,
        weights: LayerWeights,
        linears: LinearFactory,
        ops: Ops,
        group: Group,
    ) -> None:
        self._number = number
        self._ops = ops
        self._qk_heads = spec.num_heads + spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._eps = spec.rms_norm_eps
        self._input_norm = weights.input_norm
        self._mlp_norm = weights.mlp_norm
        self._qk_norm = weights.qk_norm
        self._group = group
        first = group.rank == 0  # what is added once is added there
        self._qkv = linears.make(weights.qkv, weights.qkv_bias)
        self._output = linears.make(weights.output, weights.output_bias if first else None)
        self._gate_up = linears.make(weights.gate_up, weights.gate_up_bias, wide=True)
        self._down = linears.make(weights.down, weights.down_bias if first else None)

    def project(self, hidden: Tensor, delta: Tensor | None, lora: LoraBatch | None) -> Tensor:
        """Query, key and value, not rotated: [tokens, heads + 2 * kv heads, head_dim].

        `delta` is what the layer before has for `hidden`, which it is added to in place.
        """
        if delta is None:
            normed = self._ops.rms_norm(hidden, self._input_norm, self._eps)
        else:
            normed = self._ops.add_rms_norm(hidden, delta, self._input_norm, self._eps)
        fused = self._qkv(normed)
        if lora is not None:
            lora.add(self._number, Product.QKV, normed, fused)
        qkv = fused.view(hidden.shape[0], -1, self._head_dim)
        if self._qk_norm is not None:
            self._ops.qk_norm_(qkv[:, : self._qk_heads], self._qk_norm, self._eps)
        return qkv

    def finish(self, hidden: Tensor, attended: Tensor, lora: LoraBatch | None) -> Tensor:
        """Output projection, added to `hidden` in place, and MLP: what is still to be added."""
        output = self._output(attended)
        if lora is not None:
            lora.add(self._number, Product.OUTPUT, attended, output)
        self._group.sum_(output)
        normed = self._ops.add_rms_norm(hidden, output, self._mlp_norm, self._eps)
        fused = self._gate_up(normed)
        if lora is not None:
            lora.add(self._number, Product.GATE_UP, normed, fused)
        inner = self._ops.silu_mul(fused)
        down = self._down(inner)
        if lora is not None:
            lora.add(self._number, Product.DOWN, inner, down)
        self._group.sum_(down)
        return down


class Decoder:
    """Tokens to hidden states, those to logits. Not thread-safe: layers share scratch memory.

    Of several ranks each makes the same calls; heads and MLP of `spec` are then this rank's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        rope: RopeFrequencies,
        linears: LinearFactory,
        ops: Ops | None = None,
        group: Group = ALONE,
    ) -> None:
        """`ops` compute what is neither attention nor a product; torch does if nothing is said."""
        self.spec = spec
        self.ops = TorchOps() if ops is None else ops
        self.group = group
        self._embedding = weights.embedding
        self._layers = [
            Layer(number, spec, layer, linears, self.ops, group)
            for number, layer in enumerate(weights.layers)
        ]
        self._norm = weights.norm
        self._head: Linear = linears.make(weights.head)
        self._rope = rope

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def rope_table(self, length: int) -> RopeTable:
        """Rotations of positions below `length`, for `forward`."""
        return RopeTable(self._rope, length, self.dtype, self.device)

    def forward(
        self,
        token_ids: Tensor,
        rotation: Rotation,
        attention: AttentionBackend[Metadata],
        metadata: Metadata,
        lora: LoraBatch | None = None,
    ) -> Tensor:
        """One pass over `token_ids` [tokens]; gives the last layer's [tokens, hidden_size].

        `rotation` is that of each token's position. `lora` says what adapters change;
        without it this is the base model.
        """
        hidden = self._embedding.index_select(0, token_ids)
        delta = None
        for number, layer in enumerate(self._layers):
            qkv = layer.project(hidden, delta, lora)
            attended = attention.forward(number, qkv, rotation, metadata)
            delta = layer.finish(hidden, attended, lora)
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size] of some rows of what `forward` gave."""
        normed = self.ops.rms_norm(hidden, self._norm, self._eps)
        return self.group.join_columns(self._head(normed), self.spec.vocab_size)

    @property
    def _eps(self) -> float:
        return self.spec.rms_norm_eps
