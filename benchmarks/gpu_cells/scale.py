"""The sizes of everything that is measured: on a card, and in a dry run on a CPU.

A dry run goes through the same code with a model that a pocket calculator could compute.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from benchmarks.engine import smollm2_shape
from benchmarks.gpu_cells.figures import Figure
from benchmarks.gpu_cells.stopwatch import Rates, Stopwatch
from common.engine.loader import DtypeName
from common.engine.spec import ModelSpec


def llama_8b_shape() -> ModelSpec:
    """Llama 3 8B without its weights."""
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=131_072,
        rms_norm_eps=1e-5,
        eos_token_ids=(2,),
        windows=(None,) * 32,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_embeddings=False,
        rope_type="default",
        rope_parameters=(("rope_theta", 5e5), ("rope_type", "default")),
    )


def tiny_shape() -> ModelSpec:
    """The same proportions, a hundred thousandth of the work."""
    return replace(
        llama_8b_shape(),
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=512,
        windows=(None, None),
    )


def with_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The model cut off (or its first layer's window repeated) to so many layers."""
    return replace(spec, num_layers=num_layers, windows=(spec.windows[0],) * num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Pairs are (sequences, context in tokens) for decode, (new tokens, prefix) for prefill."""

    dry: bool
    big: ModelSpec
    """Whose attention and steps are measured."""
    small: ModelSpec
    """Served beside it, with the default model's weights where they can be had."""
    page_size: int
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...]
    steps: tuple[tuple[int, int], ...]
    step_target_batch: int
    """The batch size at which the step's target holds."""
    copy_mib: int
    matrix: int
    """Rows, and columns, of the two factors of the product that tells the matrix rate."""
    writes: tuple[int, ...]
    """Pages in one transfer."""
    streams: tuple[int, ...]
    prompt: int
    output: int
    served_layers: int
    """Of the big model, whose weights go through a disk."""
    served_dtype: DtypeName
    repetitions: int


FULL = Scale(
    dry=False,
    big=llama_8b_shape(),
    small=smollm2_shape(),
    page_size=16,
    decode=((1, 32_768), (8, 8192), (64, 2048), (64, 8192), (256, 1024), (256, 2048)),
    prefill=((512, 0), (2048, 0), (8192, 0), (2048, 14_336), (2048, 30_720)),
    steps=((1, 1024), (8, 1024), (64, 1024), (64, 4096), (256, 1024)),
    step_target_batch=64,
    copy_mib=4096,
    matrix=8192,
    writes=(1, 32, 512),
    streams=(1, 16),
    prompt=1024,
    output=128,
    served_layers=8,
    served_dtype="bfloat16",
    repetitions=30,
)

DRY = Scale(
    dry=True,
    big=tiny_shape(),
    small=tiny_shape(),
    page_size=4,
    decode=((1, 21), (3, 9)),
    prefill=((7, 0), (5, 8)),
    steps=((1, 9), (3, 6)),
    step_target_batch=3,
    copy_mib=1,
    matrix=32,
    writes=(1, 4),
    streams=(1, 2),
    prompt=20,
    output=5,
    served_layers=2,
    served_dtype="float32",
    repetitions=3,
)

DRY_RATES = Rates(copy=4e12, matrix=800e12)
"""What the card of a dry run does: nothing of it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every measurement gets."""

    scale: Scale
    device: torch.device
    dtype: torch.dtype
    stopwatch: Stopwatch
    rates: Rates | None
    """None where the card's own could not be measured: then there are no bounds."""
    scratch: str
    """Folder for files that are large for a while."""
    model: str
    """The small model: a name, a folder, or `random`."""


Measure = Callable[[Setting, float], Mapping[str, Figure]]
"""Measures within so many seconds; gives figures by the names of their rows."""

Cells = Mapping[str, Measure]
