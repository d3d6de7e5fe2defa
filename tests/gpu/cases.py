"""What is tested on a device: real shapes. In a dry run each list is one or two tiny cases."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from benchmarks.gpu_cells.pytest_runs import DRY_VARIABLE
from tests.gpu.accuracy import BFLOAT16, FLOAT16, FLOAT32
from tests.gpu.paged import Shape

Case = TypeVar("Case")

DRY = os.environ.get(DRY_VARIABLE) == "1"

SMOLLM2 = Shape(num_heads=9, num_kv_heads=3, head_dim=64)
LLAMA_8B = Shape(num_heads=32, num_kv_heads=8, head_dim=128)
EQUAL_HEADS = Shape(num_heads=16, num_kv_heads=16, head_dim=128)
EIGHT_TO_ONE = Shape(num_heads=16, num_kv_heads=2, head_dim=128)
LARGE_PAGES = Shape(num_heads=32, num_kv_heads=8, head_dim=128, page_size=64)
TINY = Shape(num_heads=4, num_kv_heads=2, head_dim=16, page_size=4)


def sized(real: Sequence[Case], tiny: Sequence[Case]) -> Sequence[Case]:
    return tiny if DRY else real


# The interpreter cuts float32 off where hardware rounds it to bfloat16.
DTYPES = sized([FLOAT32, FLOAT16, BFLOAT16], [FLOAT32, FLOAT16])


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`spans` are (start, length) of new tokens, one sequence each."""

    shape: Shape
    spans: tuple[tuple[int, int], ...]
    dtype: torch.dtype = BFLOAT16
    window: int | None = None

    def __str__(self) -> str:
        longest = max(start + length for start, length in self.spans)
        tokens = sum(length for _, length in self.spans)
        dtype = str(self.dtype).removeprefix("torch.")
        window = "" if self.window is None else f"-w{self.window}"
        parts = f"{len(self.spans)}x{tokens}of{longest}"
        return f"{self.shape}-p{self.shape.page_size}-{parts}-{dtype}{window}"


def singles(*contexts: int) -> tuple[tuple[int, int], ...]:
    return tuple((context - 1, 1) for context in contexts)


def ragged(count: int, most: int) -> tuple[int, ...]:
    """`count` lengths from 1 to `most`, with borders of pages among them."""
    return (*(1 + number * 7919 % most for number in range(count - 2)), most, 16)


DECODE = sized(
    [
        AttentionCase(LLAMA_8B, singles(1)),
        AttentionCase(LLAMA_8B, singles(32_768)),
        AttentionCase(LLAMA_8B, singles(32_767, 1, 17, 4096)),
        AttentionCase(LLAMA_8B, singles(*ragged(64, 8192))),
        AttentionCase(LLAMA_8B, singles(*ragged(256, 2048))),
        AttentionCase(LLAMA_8B, singles(*ragged(32, 16_384)), window=4096),
        AttentionCase(LLAMA_8B, singles(*ragged(16, 8192)), FLOAT16),
        AttentionCase(LLAMA_8B, singles(*ragged(16, 8192)), FLOAT32),
        AttentionCase(SMOLLM2, singles(*ragged(64, 8192))),
        AttentionCase(SMOLLM2, singles(*ragged(8, 8192)), FLOAT32),
        AttentionCase(EQUAL_HEADS, singles(*ragged(16, 4096))),
        AttentionCase(EIGHT_TO_ONE, singles(*ragged(16, 32_768))),
        AttentionCase(LARGE_PAGES, singles(*ragged(16, 32_768))),
    ],
    [
        AttentionCase(TINY, singles(1, 19, 8), FLOAT32),
        AttentionCase(TINY, singles(13, 6), FLOAT16, window=5),
    ],
)

PREFILL = sized(
    [
        AttentionCase(LLAMA_8B, ((0, 2048),)),
        AttentionCase(LLAMA_8B, ((30_720, 2048),)),
        AttentionCase(LLAMA_8B, ((32_700, 64), (12_000, 2), (0, 40))),
        AttentionCase(LLAMA_8B, ((32_700, 64), (12_000, 2)), window=4096),
        AttentionCase(LLAMA_8B, ((0, 1), (0, 17), (16, 512), (4095, 130), (1000, 300))),
        AttentionCase(LLAMA_8B, ((16_384, 1024), (0, 700)), window=4096),
        AttentionCase(LLAMA_8B, ((1500, 400), (0, 33)), FLOAT16),
        AttentionCase(LLAMA_8B, ((1500, 400), (0, 33)), FLOAT32),
        AttentionCase(SMOLLM2, ((0, 512), (511, 65), (8000, 192))),
        AttentionCase(SMOLLM2, ((0, 512), (300, 65)), FLOAT32),
        AttentionCase(EQUAL_HEADS, ((0, 600), (2048, 256))),
        AttentionCase(EIGHT_TO_ONE, ((0, 600), (2048, 256))),
        AttentionCase(LARGE_PAGES, ((0, 600), (20_000, 256))),
    ],
    [
        AttentionCase(TINY, ((0, 9), (6, 5)), FLOAT32),
        AttentionCase(TINY, ((9, 7),), FLOAT16, window=4),
        AttentionCase(TINY, ((60, 2), (0, 3)), FLOAT32),
    ],
)

MIXED = sized(
    [AttentionCase(LLAMA_8B, ((0, 512), *singles(*ragged(30, 4096)), (4000, 96)))],
    [AttentionCase(TINY, ((0, 6), *singles(3, 9)), FLOAT32)],
)
"""Chunks and single tokens in one batch."""
