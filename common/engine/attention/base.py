"""What every attention backend implements.

A backend plans once a step, from which token belongs where, and then computes each layer with that
metadata. It writes the step's keys and values into the paged cache and attends to everything the
cache holds of each sequence, the new tokens included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

Metadata = TypeVar("Metadata")


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence: positions [start, start + length)."""

    slot: int
    """Row of the page table."""
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Everything a plan is made from. The spans' tokens follow each other in the batch."""

    spans: Sequence[Span]
    page_table: Tensor
    """[slots, pages] int64; page `p // page_size` of a slot's row holds its position `p`."""
    slots: Tensor
    """[tokens] int64: whose token it is."""
    positions: Tensor
    """[tokens] int64: absolute positions."""


class AttentionBackend(Protocol[Metadata]):
    """Attention over a paged cache, causal, grouped heads, with a window per layer."""

    def plan(self, batch: AttentionBatch) -> Metadata:
        """Index work that is the same for all layers; done once a step."""
        ...

    def forward(self, layer: int, query: Tensor, kv: Tensor, metadata: Metadata) -> Tensor:
        """Store `kv` and attend.

        `query` [tokens, num_heads, head_dim] and `kv` [tokens, 2 * num_kv_heads, head_dim] (all
        keys, then all values) are rotated already and may be strided views of one projection.
        Gives [tokens, num_heads * head_dim].
        """
        ...
