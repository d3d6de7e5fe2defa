"""The linear layers of a decoder layer that an adapter may change, and where each is computed.

The decoder computes query, key and value as one product, and gate and up as one; to PEFT they are
five modules. A target says which columns of which product are its own.
"""

from dataclasses import dataclass
from enum import IntEnum

from common.engine.spec import ModelSpec


class Product(IntEnum):
    """The products of a decoder layer, in the order in which they are computed."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


@dataclass(frozen=True, slots=True)
class Target:
    """One linear layer: columns [first, first + out_features) of `product`."""

    module: str
    """Its name inside a decoder layer, like `self_attn.q_proj`."""
    product: Product
    first: int
    in_features: int
    out_features: int


def targets_of(spec: ModelSpec) -> tuple[Target, ...]:
    """Every target of one layer, those of one product next to each other. All layers are alike."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return (
        Target("self_attn.q_proj", Product.QKV, 0, hidden, query),
        Target("self_attn.k_proj", Product.QKV, query, hidden, kv),
        Target("self_attn.v_proj", Product.QKV, query + kv, hidden, kv),
        Target("self_attn.o_proj", Product.OUTPUT, 0, query, hidden),
        Target("mlp.gate_proj", Product.GATE_UP, 0, hidden, inner),
        Target("mlp.up_proj", Product.GATE_UP, inner, hidden, inner),
        Target("mlp.down_proj", Product.DOWN, 0, inner, hidden),
    )
