"""Which device computes, and with which kernels: from flags to choices, or a clear refusal.

Nothing here touches CUDA unless a GPU was asked for or may be taken (`auto`), and nothing imports
Triton: that it could be imported is looked up, not tried.
"""

import importlib.util
import logging
import os
import re
from typing import Literal

import torch

from common.engine.errors import DeviceError

AttentionName = Literal["torch", "triton"]

INTERPRETER = "TRITON_INTERPRET"
"""Triton's own switch: kernels run in Python, on any device, slowly."""

log = logging.getLogger(__name__)


def choose_device(asked: str, rank: int = 0) -> torch.device:
    """The device that `cpu`, `cuda`, `cuda:N` or `auto` means on this machine.

    `auto` is a GPU where torch sees one. Rank `rank` of a node that computes on several GPUs has
    the one `rank` behind its first. A GPU always comes with its index.

    Raises:
        DeviceError: no such device, or none that this build of torch can use.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    match = re.fullmatch(r"auto|cuda(?::(\d{1,4}))?", asked)
    if match is None:
        raise DeviceError(f"device: {asked!r} is none of cpu, cuda, cuda:N, auto")
    if torch.version.cuda is None and torch.version.hip is None:
        raise DeviceError(f"device: {asked}, but this torch ({torch.__version__}) computes on CPUs")
    index, count = int(match[1] or 0) + rank, torch.cuda.device_count()
    if index >= count:
        there = f"only {count}" if count else "none"
        raise DeviceError(f"device: {asked} needs GPU {index}, and torch sees {there} here")
    return torch.device("cuda", index)


def choose_attention(asked: str, device: torch.device) -> AttentionName:
    """Which kernels compute on `device`: `torch`, `triton`, or `auto`, Triton on a GPU that has it.

    Raises:
        DeviceError: Triton cannot run there.
    """
    if asked == "torch" or (asked == "auto" and device.type == "cpu"):
        return "torch"
    problem = _triton_problem(device)
    if problem is None:
        return "triton"
    if asked == "auto":
        log.warning("%s, so torch computes, more slowly", problem)
        return "torch"
    raise DeviceError(f"attention: triton, but {problem}")


def activate(device: torch.device) -> None:
    """Make a GPU the current one of this thread: that is where Triton launches its kernels."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def answers(device: torch.device) -> bool:
    """Waits for all that was launched on a GPU; False if nothing will ever be computed there again
    by this process, as after a bad memory access."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
    return True


def interprets() -> bool:
    """Whether Triton was told to interpret its kernels."""
    return os.environ.get(INTERPRETER, "").lower() in ("1", "true", "on", "yes", "y")


def _triton_problem(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cpu" and not interprets():
        return f"on a CPU it runs only in its interpreter ({INTERPRETER}=1), which is for tests"
    return None
