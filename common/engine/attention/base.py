"""What every attention backend implements.

A backend plans once a step, from which token belongs where, and then computes each layer with that
metadata. It rotates the step's queries and keys, writes keys and values into the paged cache and
attends to everything the cache holds of each sequence, the new tokens included. These belong
together because a GPU does the first two in one pass over the projection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

Metadata = TypeVar("Metadata")

Rotation = tuple[Tensor, Tensor]
"""(cos, sin) of each token's position, [tokens, 1, head_dim] each, as `RopeTable.at` gives them."""


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

    def forward(self, layer: int, qkv: Tensor, rotation: Rotation, metadata: Metadata) -> Tensor:
        """Rotate query and key, store key and value, attend.

        `qkv` [tokens, num_heads + 2 * num_kv_heads, head_dim] (all queries, all keys, all values)
        is not rotated yet and may be overwritten; it may be a strided view. Gives
        [tokens, num_heads * head_dim].
        """
        ...
