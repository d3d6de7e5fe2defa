"""Attention by the name that `common.engine.device.choose_attention` chose."""

from collections.abc import Sequence
from pathlib import Path
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
    choices: Path | None = None,
    *,
    measure: bool = False,
) -> AttentionBackend[Any]:
    """The backend over `cache`; Triton is imported only if it is the one.

    `choices` is the file with launch configurations of Triton's that were measured on this machine;
    with `measure` what it lacks is measured and put there, on a pool that is not in use yet.
    """
    if name == "torch":
        return TorchAttention(cache, num_heads, windows, dtype)
    from common.engine.attention.measuring import attention_tuning
    from common.engine.attention.triton_backend import TritonAttention

    tuning = attention_tuning(cache, num_heads, choices, measure=measure)
    return TritonAttention(cache, num_heads, windows, tuning=tuning)
