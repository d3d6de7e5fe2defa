"""What this processor is good at, and how much of it to use."""

import functools

import torch


@functools.cache
def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def set_num_threads(threads: int | None) -> None:
    """Bound the threads of one torch operation in this process; None keeps torch's choice."""
    if threads is not None:
        torch.set_num_threads(threads)
