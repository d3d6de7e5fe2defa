"""What this processor is good at, and how much of it to use."""

import functools

import torch


@functools.cache
def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@functools.cache
def has_native_float16() -> bool:
    """Whether it does the same with float16 (AVX512-FP16 or AMX-FP16)."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)  # no mkldnn, no op
    return supported is not None and bool(supported())


def is_native(dtype: torch.dtype) -> bool:
    """Whether products of `dtype` are computed in hardware."""
    if dtype is torch.bfloat16:
        return has_native_bfloat16()
    return dtype is not torch.float16 or has_native_float16()


def set_num_threads(threads: int | None) -> None:
    """Bound the threads of one torch operation in this process; None keeps torch's choice."""
    if threads is not None:
        torch.set_num_threads(threads)
