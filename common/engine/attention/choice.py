"""Attention by the name that `common.engine.device.choose_attention` chose."""

from collections.abc import Sequence
from typing import Any

import torch

from common.engine.attention.base import AttentionBackend
from common.engine.attention.torch_backend import TorchAttention
from common.engine.device import AttentionName
from common.kv_cache.storage import PagedKVCache


def make_attention(
    name: AttentionName,
    cache: PagedKVCache,
    num_heads: int,
    windows: Sequence[int | None],
    dtype: torch.dtype,
) -> AttentionBackend[Any]:
    """The backend over `cache`; Triton is imported only if it is the one."""
    if name == "torch":
        return TorchAttention(cache, num_heads, windows, dtype)
    from common.engine.attention.triton_backend import TritonAttention

    return TritonAttention(cache, num_heads, windows)
