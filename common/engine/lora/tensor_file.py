"""Reads a safetensors file with plain reads, one tensor at a time.

The library maps the file into memory: where somebody truncates it meanwhile (a training job that
saves again), touching the lost part is a SIGBUS and the end of the process. A read that comes up
short is an error of one adapter instead. The format is eight bytes of header length, a JSON header
of names, dtypes, shapes and offsets, and the data.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

MAX_HEADER_BYTES = 32 << 20
"""A hundred thousand tensors need less."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorFileError(Exception):
    """The file is not what it should be; the message says how."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the header says of a tensor. `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class TensorFile:
    """An open file. Use it as a context manager; raises `TensorFileError`, or OSError."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("rb", buffering=0)
        try:
            self.tensors: Mapping[str, StoredTensor] = _header(self._file)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, name: str) -> Tensor:
        """The tensor of that name in the file's own dtype, which must be one of `DTYPES`."""
        stored = self.tensors[name]
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        view = raw_bytes(tensor)
        self._file.seek(stored.offset)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise TensorFileError(f"it ends inside {name}")
            done += count
        return tensor


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _header(file: BinaryIO) -> dict[str, StoredTensor]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(_read(file, 8), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise TensorFileError(f"its header cannot be {length} bytes long")
    try:
        header = msgspec.json.decode(_read(file, length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TensorFileError(f"its header cannot be read: {error}") from error
    return {name: _stored(name, entry, 8 + length, size) for name, entry in entries.items()}


def _stored(name: str, entry: _Entry, data: int, size: int) -> StoredTensor:
    first, last = entry.data_offsets
    if not 0 <= first <= last <= size - data:
        raise TensorFileError(f"{name} lies outside of it")
    if any(length < 0 for length in entry.shape):
        raise TensorFileError(f"{name} has the shape {entry.shape}")
    dtype = DTYPES.get(entry.dtype)
    if dtype is not None and math.prod(entry.shape) * dtype.itemsize != last - first:
        raise TensorFileError(f"{name} has {last - first} bytes, its shape is {entry.shape}")
    return StoredTensor(entry.dtype, tuple(entry.shape), data + first, last - first)


def _read(file: BinaryIO, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = file.read(count - len(found))
        if not part:
            raise TensorFileError("it is cut off")
        found += part
    return bytes(found)
