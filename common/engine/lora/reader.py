"""From a name to an adapter in host memory: resolve, judge the config, read the tensors strictly.

What an adapter does is decided by its tensors and their scalings. Nothing is guessed: a tensor that
has no place in this model is an error that names it, and all names and shapes are judged before the
first tensor is read, so what is read is bounded by the model and not by the file.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.engine.errors import AdapterError, ModelNotFoundError
from common.engine.loader import fetch, local_folder
from common.engine.lora.adapter import Factors, LoraAdapter
from common.engine.lora.peft_config import CONFIG_FILE, PeftConfig, incompatible, read_config
from common.engine.lora.targets import Target, targets_of
from common.engine.lora.tensor_file import (
    DTYPES,
    StoredTensor,
    TensorFile,
    TensorFileError,
    raw_bytes,
)
from common.engine.spec import ModelSpec

WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 256
CHECKED_AT_A_TIME = 1 << 14
"""Elements; torch would share out more among threads that belong to the engine."""
LARGEST = 1e18
"""Weights beyond this are nonsense, and could overflow where adapters are computed together."""

_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(\d{1,6})\.(.+)\.lora_([AB])\.weight", re.A
)
_REFUSED_NAMES = {
    "lora_embedding_": "embeddings cannot be adapted",
    "embed_tokens": "embeddings cannot be adapted",
    "lm_head": "the output layer cannot be adapted",
    "lora_magnitude_vector": "DoRA adapters cannot be served",
    "lora_B.bias": "adapters with biases cannot be served",
}

log = logging.getLogger(__name__)


def find_adapter(path: str) -> Path | None:
    """The folder, or None if it can only be a Hugging Face id. Raises AdapterError."""
    try:
        return local_folder(path, "adapter")
    except (ModelNotFoundError, OSError, ValueError, RuntimeError) as error:
        raise AdapterError(str(error)) from error


def fetch_adapter(path: str, *, newest: bool = True) -> Path:
    """Where the files of a Hugging Face id are, once they are; see `common.engine.loader.fetch`.

    Raises AdapterError.
    """
    try:
        return fetch(path, [CONFIG_FILE, WEIGHTS_FILE], newest=newest)
    except (ModelNotFoundError, OSError, ValueError, RuntimeError) as error:
        raise AdapterError(str(error)) from error


def read_folder(
    folder: Path, spec: ModelSpec, max_rank: int, rest: Callable[[], None] = lambda: None
) -> LoraAdapter:
    """Read what PEFT has written.

    `rest` is called between pieces of work of a few milliseconds; what it raises ends the reading.
    Raises AdapterError with a message for whoever named the adapter.
    """
    try:
        config = read_config(folder)
        with _open(folder) as file:
            layers = _read(file, config, spec, min(max_rank, MAX_RANK), rest)
        digest = _digest(layers, rest)
    except TensorFileError as error:
        raise AdapterError(f"{WEIGHTS_FILE} is damaged: {error}") from error
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise AdapterError(f"{folder} cannot be read: {error}") from error
    rank = max(factors.rank for layer in layers for factors in layer.values())
    return LoraAdapter(layers, rank, digest)


def _open(folder: Path) -> TensorFile:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise AdapterError(f"{folder} has no {WEIGHTS_FILE}; only safetensors are read")
    return TensorFile(path)


@dataclass(slots=True)
class _Pair:
    """The names of a module's two tensors, while they are looked for."""

    layer: int
    target: Target
    names: dict[str, str]

    @property
    def module(self) -> str:
        return f"model.layers.{self.layer}.{self.target.module}"


def _read(
    file: TensorFile,
    config: PeftConfig,
    spec: ModelSpec,
    max_rank: int,
    rest: Callable[[], None],
) -> tuple[dict[str, Factors], ...]:
    pairs = _pair_up(file.tensors, spec)
    scalings = config.scalings([pair.module for pair in pairs])
    for pair in pairs:
        _check_shapes(pair, file.tensors, scalings[pair.module][0], max_rank)
    layers: tuple[dict[str, Factors], ...] = tuple({} for _ in range(spec.num_layers))
    for pair in pairs:
        scaling = scalings[pair.module][1]
        shrink = _finite(file, pair.names["A"], LARGEST, rest)
        expand = _finite(file, pair.names["B"], LARGEST / max(abs(scaling), 1.0), rest)
        layers[pair.layer][pair.target.module] = Factors(shrink, expand, scaling)
    return layers


def _pair_up(tensors: Mapping[str, StoredTensor], spec: ModelSpec) -> list[_Pair]:
    """A and B of each module, in the order of layers and targets."""
    targets = {target.module: target for target in targets_of(spec)}
    found: dict[tuple[int, str], _Pair] = {}
    for name in tensors:
        layer, module, letter = _place(name, targets, spec)
        pair = found.setdefault((layer, module), _Pair(layer, targets[module], {}))
        if letter in pair.names:
            raise incompatible(f"{name} comes twice")
        pair.names[letter] = name
    if not found:
        raise incompatible("it holds no tensors")
    for pair in found.values():
        if len(pair.names) < 2:
            ((letter, name),) = pair.names.items()
            other = {"A": "B", "B": "A"}[letter]
            raise incompatible(f"there is {name}, but no lora_{other} of it")
    order = {module: number for number, module in enumerate(targets)}
    return [found[key] for key in sorted(found, key=lambda key: (key[0], order[key[1]]))]


def _place(name: str, targets: Mapping[str, Target], spec: ModelSpec) -> tuple[int, str, str]:
    """(layer, module, A or B) of a tensor's name."""
    for part, reason in _REFUSED_NAMES.items():
        if part in name:
            raise incompatible(f"it holds {name[:200]}: {reason}")
    match = _TENSOR.fullmatch(name)
    if match is None:
        raise incompatible(f"it holds {name[:200]}, which is no LoRA weight of this model")
    layer, module, letter = int(match[1]), match[2], match[3]
    if layer >= spec.num_layers:
        raise incompatible(f"{name[:200]}: the base model has {spec.num_layers} layers")
    if module not in targets:
        known = ", ".join(target.rpartition(".")[2] for target in targets)
        raise incompatible(f"{name[:200]}: only {known} can be adapted")
    return layer, module, letter


def _check_shapes(
    pair: _Pair, tensors: Mapping[str, StoredTensor], rank: int, max_rank: int
) -> None:
    """The base model's sizes, and the rank that the config gives this module."""
    target = pair.target
    if rank > max_rank:
        raise incompatible(f"{pair.module} has rank {rank}, the largest served is {max_rank}")
    wanted = {"A": (rank, target.in_features), "B": (target.out_features, rank)}
    for letter, name in pair.names.items():
        stored = tensors[name]
        if stored.dtype not in DTYPES:
            raise incompatible(f"{name} is {stored.dtype}; {', '.join(DTYPES)} can be read")
        if stored.shape != wanted[letter]:
            raise incompatible(
                f"{name} is {list(stored.shape)}, the base model and rank {rank} of {CONFIG_FILE} "
                f"want {list(wanted[letter])}"
            )


def _finite(file: TensorFile, name: str, bound: float, rest: Callable[[], None]) -> Tensor:
    """Read a tensor; refuse what is not finite, or so large that it soon would not be."""
    tensor = file.read(name)
    for piece in torch.split(tensor.view(-1), CHECKED_AT_A_TIME):
        if not float(piece.abs().max()) <= bound:
            raise incompatible(f"{name} holds values that are not finite, or beyond {bound:.0e}")
        rest()
    return tensor


def _digest(layers: Sequence[Mapping[str, Factors]], rest: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    for label, tensor in _labelled(layers):
        digest.update(label.encode())
        digest.update(raw_bytes(tensor))  # lets other threads run meanwhile
        rest()
    return digest.hexdigest()[:32]


def _labelled(layers: Sequence[Mapping[str, Factors]]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with whatever else determines what it does, unambiguously."""
    for number, layer in enumerate(layers):
        for module, factors in layer.items():
            for letter, tensor in (("A", factors.shrink), ("B", factors.expand)):
                shape = "x".join(str(length) for length in tensor.shape)
                scaling = factors.scaling.hex()
                yield f"{number}.{module}.{letter} {shape} {tensor.dtype} {scaling}\n", tensor
