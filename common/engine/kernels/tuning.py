"""Launch configurations of the attention kernels: defaults by card, and choices that were measured.

A default is worked out from the card's shared memory and the size of a tile; where a table of one
card would say more, `common.engine.attention.measuring` measures and a `ChoiceFile` keeps what it
found. Nothing here launches a kernel.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from triton.runtime.errors import OutOfResources

DOES_NOT_FIT: type[Exception] = OutOfResources
"""Raised by a launch that asks for more shared memory or registers than the card has."""
INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels are interpreted in this process. `tl.dot` multiplies bfloat16 wrongly there, so
kernels cast its operands to float32 then."""

SHARED_MEMORY: Mapping[tuple[int, int], int] = {
    (8, 0): 166912,  # A100
    (8, 6): 101376,  # A10, RTX 30
    (8, 9): 101376,  # L4, L40, RTX 40
    (9, 0): 232448,  # H100, H200
    (10, 0): 232448,  # B200
    (12, 0): 101376,  # RTX 50
}
"""Bytes that one program may have, by compute capability."""
LEAST_SHARED_MEMORY = 101376
"""Of a card that the table lacks."""

FEW_TOKENS = 256
"""Up to here a step's tokens are stored by many small programs."""

log = logging.getLogger(__name__)


def dot_precision(dtype: torch.dtype) -> str:
    """Of `tl.dot`: float32 is multiplied as float32, which other dtypes do not ask for."""
    return "ieee" if dtype is torch.float32 else "tf32"


@dataclass(frozen=True)
class Card:
    name: str
    capability: tuple[int, int]
    processors: int

    @classmethod
    def of(cls, device: torch.device) -> "Card":
        if device.type != "cuda":
            return cls("interpreter", (0, 0), 4)
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        return cls(properties.name, capability, properties.multi_processor_count)

    @property
    def shared_memory(self) -> int:
        return SHARED_MEMORY.get(self.capability, LEAST_SHARED_MEMORY)


@dataclass(frozen=True)
class StoreConfig:
    block_tokens: int
    num_warps: int = 4

    @classmethod
    def default(cls, num_tokens: int) -> "StoreConfig":
        """Many programs where there are few tokens, wide ones where there are many."""
        return cls(2, 1) if num_tokens <= FEW_TOKENS else cls(16, 4)


@dataclass(frozen=True)
class PrefillConfig:
    block_rows: int
    """Query rows of a program: tokens times the query heads of one KV head."""
    block_keys: int
    num_warps: int
    num_stages: int
    min_keys: int = 1024
    """Of a part of a tile that is split."""

    def tokens(self, group: int) -> int:
        """Tokens of a tile, where `group` query heads share a KV head."""
        assert group <= self.block_rows, f"{group} heads do not fit into {self.block_rows} rows"
        return self.block_rows // group


@dataclass(frozen=True)
class DecodeConfig:
    block_keys: int
    num_warps: int
    num_stages: int
    min_keys: int
    """Of a piece of a sequence that is split."""
    resident: int
    """Programs that one processor runs at once: work is split into so many pieces for each."""


@dataclass(frozen=True)
class AttentionTuning:
    prefill: PrefillConfig
    decode: DecodeConfig
    processors: int
    store: StoreConfig | None = None
    """None: by the number of tokens."""

    @classmethod
    def default(
        cls, card: Card, head_dim: int, group: int, dtype: torch.dtype
    ) -> "AttentionTuning":
        block_dim = max(16, triton.next_power_of_2(head_dim))
        prefill = default_prefill(card, block_dim, dtype.itemsize)
        rows = max(prefill.block_rows, triton.next_power_of_2(group))
        decode = default_decode(card, block_dim, dtype.itemsize)
        return cls(replace(prefill, block_rows=rows), decode, card.processors)


def default_prefill(card: Card, block_dim: int, itemsize: int) -> PrefillConfig:
    """Tiles that neither spill registers nor exceed shared memory (compiled for every card above).

    Three stages where they fit: with fewer, keys and values are awaited as soon as they are asked
    for. float32 is multiplied without tensor cores, and is for tests of models rather than for
    serving them.
    """
    if itemsize == 4:
        return PrefillConfig(32, 16, 8, 2) if block_dim <= 128 else PrefillConfig(16, 16, 4, 2)
    if block_dim <= 64 or (block_dim <= 128 and card.shared_memory > LEAST_SHARED_MEMORY):
        return PrefillConfig(128, 64, 8, 3)
    if block_dim <= 128:
        return PrefillConfig(128, 32, 8, 3)
    if card.capability[0] in (9, 10):
        return PrefillConfig(128, 32, 8, 3)
    return PrefillConfig(64, 32, 8, 3) if card.capability == (8, 0) else PrefillConfig(64, 16, 4, 3)


def default_decode(card: Card, block_dim: int, itemsize: int) -> DecodeConfig:
    """Tiles of at most 16 KiB of keys, of which at least two programs fit on a processor.

    With three stages a program has two tiles of keys and two of values under way, so that two or
    three programs keep some 100 KiB of a processor's reads in flight: more than memory's latency
    times its bandwidth.
    """
    if itemsize == 4:
        return DecodeConfig(16, 4, 2, 256, 2)
    block_keys = 128
    while block_keys > 16 and (
        block_keys * block_dim * itemsize > 16384
        or 2 * _decode_memory(block_keys, block_dim, itemsize) > card.shared_memory
    ):
        block_keys //= 2
    resident = card.shared_memory // _decode_memory(block_keys, block_dim, itemsize)
    return DecodeConfig(block_keys, 4, 3, 256, min(4, max(1, resident)))


def _decode_memory(block_keys: int, block_dim: int, itemsize: int) -> int:
    """Two buffers of keys and of values, and 8 KiB for queries and exchanges between warps."""
    return 4 * block_keys * block_dim * itemsize + 8192


# ---------------------------------------------------------------- measured choices

Config = TypeVar("Config", PrefillConfig, DecodeConfig)


def choice_key(
    card: Card, kernel: str, head_dim: int, group: int, page_size: int, dtype: torch.dtype
) -> str:
    """What a choice depends on, the compiler's release included."""
    shape = f"head_dim {head_dim}, group {group}, page_size {page_size}"
    name = str(dtype).removeprefix("torch.")
    return f"{kernel}: {shape}, {name}, {card.name}, triton {triton.__version__}"


def fastest(
    candidates: Iterable[Config], seconds: Callable[[Config], float | None]
) -> Config | None:
    """The candidate that takes the fewest `seconds`; None says that one does not run here."""
    measured = [(seconds(candidate), candidate) for candidate in candidates]
    ran = [(taken, candidate) for taken, candidate in measured if taken is not None]
    return min(ran, key=lambda pair: pair[0])[1] if ran else None


class ChoiceFile:
    """Measured choices as JSON, shared by processes that may read and write at the same time.

    A file that cannot be read, or holds something else, is an empty one: a choice is a matter of
    speed only. It is replaced as a whole; of two writers at a time one choice may be lost, and is
    measured again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str, kind: type[Config]) -> Config | None:
        entry = self._read().get(key)
        names = {field.name for field in fields(kind)}
        if not isinstance(entry, dict) or set(entry) != names:
            return None
        if not all(type(value) is int and value > 0 for value in entry.values()):
            return None
        return kind(**entry)

    def put(self, key: str, choice: Config) -> None:
        """Keeps the choice if the file can be written; a warning says when it cannot."""
        entries = {**self._read(), key: asdict(choice)}
        try:
            self._write(json.dumps(entries, indent=1, sort_keys=True))
        except OSError as error:
            log.warning("the measured kernel choices cannot be kept in %s: %s", self._path, error)

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}

    def _write(self, text: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(name, self._path)
        except OSError:
            with suppress(OSError):
                os.unlink(name)
            raise
