"""What `kernels.sampling` needs to know of each slot, kept on the host and sent once a step."""

import math
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.engine.kernels.sampling import (
    COLUMNS,
    DRAW,
    GREEDY,
    INDEX,
    MODE,
    SKIP,
    argmax_tokens,
    draw_tokens,
)
from common.engine.sampler import GREEDY_TEMPERATURE, Draw
from common.messages import SamplingParams


class KernelDraws:
    """`FusedDraws` with Triton: two small launches where all rows are greedy, else one."""

    def __init__(self) -> None:
        self._slots = np.zeros((0, COLUMNS), dtype=np.int64)

    def reset(self, slot: int, params: SamplingParams) -> None:
        if slot >= len(self._slots):
            more = np.zeros((slot + 1 + len(self._slots), COLUMNS), dtype=np.int64)
            more[: len(self._slots)] = self._slots
            self._slots = more
        self._slots[slot] = parameters_of(params)

    def launch(self, logits: Tensor, draws: Sequence[Draw], wanted: Sequence[bool]) -> Tensor:
        table = self._slots[[draw.slot for draw in draws]]
        table[~np.asarray(wanted), MODE] = SKIP
        if not (table[:, MODE] == DRAW).any():
            return argmax_tokens(logits)
        table[:, INDEX] = [draw.index for draw in draws]
        out = torch.zeros(len(draws), dtype=torch.int64, device=logits.device)
        return draw_tokens(logits, _sent(table, logits.device), out=out)


def parameters_of(params: SamplingParams) -> list[int]:
    """A slot's row for `draw_tokens`, but for the index."""
    greedy = params.temperature < GREEDY_TEMPERATURE
    # One less than top_p's 2^64 parts, so that an exact share is reached and not passed.
    top_p = max(1, int(params.top_p * 2**64) - 1) if params.top_p < 1.0 else 0
    min_p = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    return [
        GREEDY if greedy else DRAW, _bits(params.temperature), params.top_k, _signed(top_p),
        _bits(min_p), _signed(params.seed), params.choice, 0,
    ]  # fmt: skip


def _bits(number: float) -> int:
    """Of the nearest float32, as an int32."""
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits


def _signed(number: int) -> int:
    """The int64 that is equal modulo 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _sent(table: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """On `device`, without waiting: torch keeps the pinned copy until it has been read."""
    host = torch.from_numpy(table)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
