"""Adapters of all shapes over a small model, mixed batches of them, and what these compute."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from common.engine.lora.adapter import Factors, LoraAdapter
from common.engine.lora.base import LoraRows
from common.engine.lora.pool import LoraPool
from common.engine.lora.targets import Product, targets_of
from common.engine.spec import ModelSpec

SLOTS = 6
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=12,
    intermediate_size=20,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=64,
    rms_norm_eps=1e-5,
    eos_token_ids=(),
    windows=(None,),
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tied_embeddings=False,
    rope_type="default",
    rope_parameters=(),
)
TARGETS = targets_of(SPEC)
WIDTHS = {Product.QKV: (12, 32), Product.OUTPUT: (16, 12), Product.GATE_UP: (12, 40)}
WIDTHS[Product.DOWN] = (20, 12)


def adapter(rank: int, present: Sequence[bool], scale: float = 1.0) -> LoraAdapter:
    """A first module of the full rank, others of smaller ones."""
    layer: dict[str, Factors] = {}
    for index, target in enumerate(TARGETS):
        if present[index]:
            own = rank if not layer else max(1, rank - index)
            layer[target.module] = Factors(
                torch.randn(own, target.in_features) * scale,
                torch.randn(target.out_features, own) * scale / own**0.5,
                0.5 + index,
            )
    return LoraAdapter((layer,), rank, "")


@dataclass
class Case:
    adapters: dict[int, LoraAdapter]
    rows: list[tuple[int | None, int]]
    """(slot, tokens) of each row of the batch."""

    def pool(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LoraPool:
        pool = LoraPool(SPEC, dtype, SLOTS, 256, torch.device(device))
        for slot, each in self.adapters.items():
            pool.place(slot, each, lambda: None)
        return pool

    def lora_rows(self) -> list[LoraRows]:
        found = []
        first = 0
        for slot, count in self.rows:
            if slot is not None:
                found.append(LoraRows(slot, first, count))
            first += count
        return found

    def expected(self, product: Product, x: Tensor, y: Tensor) -> Tensor:
        """Token by token, in float64."""
        want = y.double().clone()
        first = 0
        for slot, count in self.rows:
            for target in TARGETS:
                factors = None
                if slot is not None and target.product is product:
                    factors = self.adapters[slot].layers[0].get(target.module)
                if factors is not None:
                    low = x[first : first + count].double() @ factors.shrink.double().t()
                    columns = slice(target.first, target.first + target.out_features)
                    gain = low @ factors.expand.double().t() * factors.scaling
                    want[first : first + count, columns] += gain
            first += count
        return want


RANKS = (1, 2, 7, 8, 9, 16, 32, 33, 100, 256)


@st.composite
def cases(draw: st.DrawFn, ranks: Sequence[int] = RANKS, most_rows: int = 12) -> Case:
    adapters = {}
    for slot in draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]:
        present = draw(st.lists(st.booleans(), min_size=7, max_size=7))
        if any(present):
            rank = draw(st.sampled_from(ranks))
            adapters[slot] = adapter(rank, present)
    slots = st.sampled_from([None, *adapters])
    rows = st.tuples(slots, st.sampled_from([1, 1, 1, 2, 5]))
    return Case(adapters, draw(st.lists(rows, min_size=1, max_size=most_rows)))
