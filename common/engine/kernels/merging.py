"""Queries whose keys were divided among programs: what each leaves behind, and how it is merged.

Each program leaves the average of its values and the logarithm of its total; the merge weights the
averages by the totals ("Flash-Decoding", Dao et al.).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.engine.kernels.flash import LOWEST

MERGE_FIELDS = 4
"""int32 fields of a merge: row in the batch, its first place in the workspace, number of places,
distance between them. With one place nothing is to be merged (the row is written already); with
none, which is padding, the row becomes zero."""
MERGED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Workspace:
    """What programs leave for the merge, float32."""

    averages: Tensor
    """[places, num_heads, head_dim]"""
    logarithms: Tensor
    """[places, num_heads]: of the totals, base 2; -inf where no key was seen."""

    @property
    def places(self) -> int:
        return self.averages.shape[0]

    @classmethod
    def empty(cls, places: int, num_heads: int, head_dim: int, device: torch.device) -> "Workspace":
        averages = torch.empty(places, num_heads, head_dim, device=device)
        return cls(averages, torch.empty(places, num_heads, device=device))


@triton.jit
def finish(
    acc, peak, total, place, out, averages_ptr, logarithms_ptr, at, mask, row_mask, column,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Write averages to `out` or, with a `place`, to rows `at` (place, head) of the workspace."""
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    average = acc / total[:, None]
    if place < 0:
        tl.store(out, average.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(averages_ptr + (at * HEAD_DIM)[:, None] + column, average, mask=mask)
        logarithm = tl.where(seen, peak + tl.log2(total), float("-inf"))
        tl.store(logarithms_ptr + at, logarithm, mask=row_mask)


@triton.jit(do_not_specialize_on_alignment=["merges_ptr"])
def _merge_kernel(
    out_ptr, out_token_stride, averages_ptr, logarithms_ptr, merges_ptr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MERGE_FIELDS: tl.constexpr,
    BLOCK_PLACES: tl.constexpr, BLOCK_DIM: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    merge = merges_ptr + tl.program_id(1) * MERGE_FIELDS
    count = tl.load(merge + 2)
    if count == 1:
        return
    batch_row = tl.load(merge).to(tl.int64)
    place = tl.load(merge + 1).to(tl.int64)
    distance = tl.load(merge + 3)
    column = tl.arange(0, BLOCK_DIM)
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    peak = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, count, BLOCK_PLACES):
        number = first + tl.arange(0, BLOCK_PLACES)
        at = (place + number * distance) * NUM_HEADS + head
        logarithm = tl.load(logarithms_ptr + at, mask=number < count, other=float("-inf"))
        average = tl.load(
            averages_ptr + (at * HEAD_DIM)[:, None] + column[None, :],
            mask=(number < count)[:, None] & (column < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(logarithm, 0))
        weight = tl.exp2(logarithm - higher)
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weight, 0)
        acc = acc * fade + tl.sum(average * weight[:, None], 0)
        peak = higher
    if count > 0:
        acc = acc / total
    out = out_ptr + batch_row * out_token_stride + head * HEAD_DIM + column
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def merge(out: Tensor, workspace: Workspace, merges: Tensor) -> None:
    """Write the rows that `merges` [rows, MERGE_FIELDS] int32 names into `out` [tokens, heads *
    head_dim]."""
    _, num_heads, head_dim = workspace.averages.shape
    _merge_kernel[num_heads, merges.shape[0]](
        out, out.stride(0), workspace.averages, workspace.logarithms, merges,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, MERGE_FIELDS=MERGE_FIELDS,
        BLOCK_PLACES=MERGED_AT_ONCE, BLOCK_DIM=triton.next_power_of_2(head_dim),
        LOWEST=LOWEST.value, num_warps=2, enable_fp_fusion=True,
    )  # fmt: skip
