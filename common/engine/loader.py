"""From a name to a model in memory: resolve, read the config, fill the weights strictly."""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from common.engine.decoder import Decoder, Weights
from common.engine.errors import ModelError, ModelNotFoundError, WeightsError
from common.engine.linear import LinearFactory
from common.engine.ops import Ops
from common.engine.parallel.group import ALONE, Group
from common.engine.parallel.shards import Cut, Shard
from common.engine.rope import frequencies
from common.engine.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_INDEX = "model.safetensors.index.json"
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_PROGRESS_EVERY_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    spec: ModelSpec
    """The whole model's; `model.spec` has this rank's heads and MLP."""
    model: Decoder
    digest: str
    """Of the architecture and the weight files' names and sizes; equal on nodes that match."""
    dtype: torch.dtype
    """Of weights, activations and KV."""

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16` or `float16`, as fingerprints and flags spell it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Where its weights are; KV and everything that meets them belong there too."""
        return self.model.device


def resolve(name: str, files: Sequence[str] = _MODEL_FILES, what: str = "model") -> Path:
    """A local folder as it is, or the `files` of a Hugging Face id (with progress on stderr).

    Raises `ModelNotFoundError`, which calls it a `what`.
    """
    return local_folder(name, what) or fetch(name, files)


def local_folder(name: str, what: str = "model") -> Path | None:
    """The folder of that name; None if `name` can only be a Hugging Face id.

    Raises `ModelNotFoundError` for a path at which nothing is.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")):
        raise ModelNotFoundError(f"there is no {what} folder {name}")
    return None


def fetch(name: str, files: Sequence[str], *, newest: bool = True) -> Path:
    """The `files` of a Hugging Face id. Takes as long as the hub needs.

    `newest`: ask the hub; else what was fetched before will do, if there is any.
    Raises `ModelNotFoundError`.
    """
    if not newest:
        with suppress(LocalEntryNotFoundError, HFValidationError, OSError):
            return Path(snapshot_download(name, allow_patterns=list(files), local_files_only=True))
    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{name!r} is no folder and no Hugging Face id") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"{name!r} is no local folder and could not be fetched: {error}"
        ) from error


def load_model(
    path: Path,
    dtype: DtypeName = "auto",
    device: torch.device = CPU,
    ops: Ops | None = None,
    *,
    group: Group = ALONE,
) -> LoadedModel:
    """Load the model in `path` to `device`.

    `auto` takes the checkpoint's dtype, but for float16 on a CPU, where float32 is faster. Weights
    are made on the device and filled from the files one tensor at a time, so host memory never
    holds more of them than one.

    `ops` are for the decoder. Of the ranks of a `group` each loads its own part, and reads no more
    than that.

    Raises `ModelError` (see `common.engine.errors`) with a message for whoever named the model.
    """
    config = _read_config(path)
    spec = ModelSpec.from_config(config, _read_generation_config(path))
    shard = Shard.of(spec, group.rank, group.size)
    files = _weight_files(path)
    torch_dtype = _choose_dtype(config, dtype, device)
    weights = _allocate(shard, torch_dtype, device)
    _fill(weights.checkpoint_tensors(shard.local), files, shard)
    rope = frequencies(config, spec)
    model = Decoder(shard.local, weights, rope, LinearFactory(), ops, group)
    return LoadedModel(spec, model, _digest(spec, files), torch_dtype)


def _read_config(path: Path) -> "PretrainedConfig":
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(f"{path} has no config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{path / 'config.json'} cannot be read: {error}") from error
    return config


def _read_generation_config(path: Path) -> "GenerationConfig | None":
    if not (path / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(path, local_files_only=True)


def _choose_dtype(
    config: "PretrainedConfig", dtype: DtypeName, device: torch.device
) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    if config.dtype is torch.bfloat16:
        return torch.bfloat16
    half = device.type != "cpu" and config.dtype is torch.float16
    return torch.float16 if half else torch.float32


def _allocate(shard: Shard, dtype: torch.dtype, device: torch.device) -> Weights:
    try:
        return Weights.empty(shard.local, dtype, device, shard.vocab)
    except torch.OutOfMemoryError as error:
        first = str(error).partition("\n")[0]
        raise WeightsError(f"the weights do not fit into {device}: {first}") from error


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files that make the checkpoint, in a stable order."""
    if (path / _INDEX).is_file():
        index = json.loads((path / _INDEX).read_text())
        files = [path / name for name in sorted(set(index["weight_map"].values()))]
    else:
        files = [path / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise WeightsError(f"{path} has no {file.name}; only safetensors are read")
    return files


def _fill(places: dict[str, Tensor], files: list[Path], shard: Shard) -> None:
    """Copy to every place its part; each place is filled exactly once, and nothing is left."""
    missing = dict(places)
    total = sum(place.numel() for place in places.values())
    done = 0
    began = told = time.monotonic()
    for file in files:
        for name, stored in _stored(file):
            if name not in missing:
                _refuse_unexpected(name, file, places, shard.spec.tied_embeddings)
                continue
            _copy(name, missing.pop(name), stored, shard.cut(name))
            done += places[name].numel()
            if time.monotonic() - told > _PROGRESS_EVERY_S:
                told = time.monotonic()
                log.info("loading weights: %d %% of %d M", 100 * done // total, total // 10**6)
    if missing:
        raise WeightsError(f"the checkpoint lacks {_some(list(missing))}")
    log.info("loaded %d M weights in %.1f s", total // 10**6, time.monotonic() - began)


class Stored(Protocol):
    """A tensor in a file: what is indexed is read, and nothing else of it."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


def _stored(file: Path) -> Iterator[tuple[str, Stored]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                yield name, opened.get_slice(name)
    except SafetensorError as error:
        raise WeightsError(f"{file} is damaged: {error}") from error


def _refuse_unexpected(name: str, file: Path, places: dict[str, Tensor], tied: bool) -> None:
    # Old exports keep buffers that are computed here, and a copy of what is tied.
    if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
        return
    if name in places:
        raise WeightsError(f"{name} comes twice, the second time in {file.name}")
    raise WeightsError(f"{file.name} holds {name}, which this architecture does not have")


def _copy(name: str, place: Tensor, stored: Stored, cut: Cut | None) -> None:
    # One norm vector for all heads is kept once a head, so that one product applies it.
    part = place.shape[1:] if name.endswith(("q_norm.weight", "k_norm.weight")) else place.shape
    wanted = tuple(part) if cut is None else cut.shape_of_whole(part)
    shape = tuple(stored.get_shape())
    if shape != wanted:
        raise WeightsError(f"{name} is {list(shape)}, the config says {list(wanted)}")
    place.copy_(stored[(slice(None),) if cut is None else cut.index])


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _digest(spec: ModelSpec, files: list[Path]) -> str:
    described = {"spec": asdict(spec), "files": [(f.name, f.stat().st_size) for f in files]}
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
