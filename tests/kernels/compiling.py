"""`python -m tests.kernels.compiling 80 90`: compile the kernels in the table for these GPUs.

Says for each how many registers and bytes of shared memory a program takes; one that spills
registers, or does not compile, makes the exit code 1.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.engine.kernels import (
    activation,
    decode_attention,
    lora,
    merging,
    norm,
    prefill_attention,
    sampling,
    store,
    tuning,
)

POINTERS = {"bf16": "*bf16", "f32": "*fp32", "i32": "*i32", "i64": "*i64"}


@dataclass(frozen=True)
class Entry:
    """A kernel as it is launched for a large model."""

    kernel: Any
    pointers: Mapping[str, str]
    """By parameter: the dtype behind it, as in `POINTERS`. All others are int32 but `floats`."""
    constants: Mapping[str, Any]
    num_warps: int
    floats: tuple[str, ...] = ("eps",)
    spills: int = 0
    """Bytes a thread may put aside."""
    options: Mapping[str, int] = field(default_factory=dict)
    contains: tuple[str, ...] = ()
    """Patterns that the compiler's output must match."""

    def compile(self, capability: int) -> str:
        """What it takes; raises where it does not compile, or spills."""
        names = self.kernel.arg_names
        signature = {name: self._type(name) for name in names}
        constexprs = {
            (place,): self.constants[name]
            for place, name in enumerate(names)
            if name in self.constants
        }
        aligned = [[["tt.divisibility", 16]] if self._aligned(name) else None for name in names]
        attributes = {(place,): said for place, said in enumerate(aligned) if said is not None}
        source = ASTSource(self.kernel, signature, constexprs, attributes)
        options = {"num_warps": self.num_warps, **self.options}
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=options)
        registers, spilled = _resources(compiled.asm["cubin"])
        assert spilled <= self.spills, f"{self.kernel.__name__} spills {spilled} bytes"
        text = compiled.asm["ttgir"] + compiled.asm["ptx"]
        for pattern in self.contains:
            assert re.search(pattern, text), f"{self.kernel.__name__} has no {pattern}"
        shared = compiled.metadata.shared
        return (
            f"{self.kernel.__name__} compiles for sm_{capability}: {registers} registers,"
            f" {shared} bytes shared, {spilled} bytes spilled"
        )

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in self.pointers:
            return POINTERS[self.pointers[name]]
        return "fp32" if name in self.floats else "i32"

    def _aligned(self, name: str) -> bool:
        """What a launch would find to be a multiple of 16: addresses, and widths of a model."""
        return name in self.pointers or "stride" in name or name in ("inner", "width")


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread, as the disassembler says."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", said), re.search(r"STACK:(\d+)", said)
    assert registers is not None, said
    assert stack is not None, said
    return int(registers[1]), int(stack[1])


_ROWS = {"x": "bf16", "delta": "bf16", "weight": "bf16", "out": "bf16", "fused": "bf16"}
_DRAWS = {
    "logits": "bf16", "parameters": "i64", "tokens": "i64", "listed": "f32", "ids": "i32",
    "values": "f32", "places": "i32",
}  # fmt: skip
_LORA = {
    "x": "bf16", "y": "bf16", "memory": "bf16", "targets": "i64", "slots": "i32", "rows": "i32",
    "tiles": "i32", "low": "f32",
}  # fmt: skip
_SHRINK = {"BLOCK_RANK": 32, "BLOCK_INNER": 128, "PRECISION": "tf32", "UPCAST": False}
_EXPAND = {"BLOCK_RANK": 32, "BLOCK_OUT": 128, "PRECISION": "tf32"}

_POOL = {
    "query_ptr": "bf16", "qkv_ptr": "bf16", "out_ptr": "bf16", "pool_ptr": "bf16",
    "cos_ptr": "bf16", "sin_ptr": "bf16", "averages_ptr": "f32", "logarithms_ptr": "f32",
    "table_ptr": "i64", "slots_ptr": "i64", "positions_ptr": "i64", "tiles_ptr": "i32",
    "pieces_ptr": "i32", "merges_ptr": "i32",
}  # fmt: skip
_HEADS = {"NUM_HEADS": 32, "GROUP": 4, "HEAD_DIM": 128, "PAGE_SIZE": 16, "BLOCK_DIM": 128}
_FLASH = {**_HEADS, "PRECISION": "tf32", "UPCAST": False}
_PIPELINED = (r"async_wait [^\n]*num = [1-9]", r"cp\.async\.cg\.shared\.global [^\n]*, 0x10")
"""Keys are under way while others are computed, 16 bytes a thread. Nothing tells when a change of
the kernel has made the compiler give that up, but its speed."""
_MERGE = {
    "NUM_HEADS": 32, "HEAD_DIM": 128, "MERGE_FIELDS": 4, "BLOCK_PLACES": 8, "BLOCK_DIM": 128,
    "LOWEST": -1e30,
}  # fmt: skip
_STORE = {
    "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "PAGE_SIZE": 16, "BLOCK_TOKENS": 16,
    "BLOCK_HALF": 64,
}  # fmt: skip

ENTRIES: tuple[Entry, ...] = (
    Entry(norm._rms_norm_kernel, _ROWS, {"HAS_DELTA": True, "HAS_WEIGHT": True, "BLOCK": 4096}, 8),
    Entry(norm._qk_norm_kernel, _ROWS, {"HEADS": 32, "BLOCK": 128}, 8),
    Entry(activation._silu_mul_kernel, _ROWS, {"BLOCK": 1024}, 4),
    Entry(lora._shrink_kernel, _LORA, {"SIZE": 16, **_SHRINK}, 4),
    Entry(lora._shrink_kernel, _LORA, {"SIZE": 64, **_SHRINK}, 8),
    Entry(lora._expand_kernel, _LORA, {"SIZE": 16, **_EXPAND}, 4),
    Entry(lora._expand_kernel, _LORA, {"SIZE": 64, **_EXPAND}, 8),
    Entry(sampling._draw_kernel, _DRAWS, {"ROWS": 1, "BLOCK": 4096}, 16, spills=64),
    Entry(sampling._split_argmax_kernel, _DRAWS, {"SPLIT": 16384, "BLOCK": 4096}, 8),
    Entry(merging._merge_kernel, _POOL, _MERGE, 2),
    Entry(store._rotate_and_store_kernel, _POOL, _STORE, 4),
    Entry(sampling._join_argmax_kernel, _DRAWS, {"SPLITS": 16}, 1),
)


def attention(capability: int) -> tuple[Entry, ...]:
    """Prefill without and with a window, and decode, as a card of that kind launches them."""
    card = tuning.Card("", divmod(capability, 10), 0)
    prefill = tuning.default_prefill(card, 128, 2)
    decode = tuning.default_decode(card, 128, 2)
    tile = {"TILE_FIELDS": 7, "BLOCK_ROWS": prefill.block_rows, "BLOCK_KEYS": prefill.block_keys}
    chunks = Entry(
        prefill_attention._prefill_kernel, _POOL, {**_FLASH, **tile, "WINDOW": 0},
        prefill.num_warps, floats=("scale",), spills=64,
        options={"num_stages": prefill.num_stages},
        contains=(*_PIPELINED, r"wgmma|mma\.sync|tcgen05\.mma"),
    )  # fmt: skip
    piece = {"PIECE_FIELDS": 5, "BLOCK_ROWS": 16, "BLOCK_KEYS": decode.block_keys}
    singles = Entry(
        decode_attention._decode_kernel, _POOL, {**_FLASH, **piece}, decode.num_warps,
        floats=("scale",), options={"num_stages": decode.num_stages},
        contains=(*_PIPELINED, r"mma\.sync"),
    )  # fmt: skip
    return chunks, replace(chunks, constants={**chunks.constants, "WINDOW": 4096}), singles


def main() -> None:
    failed = 0
    for capability in map(int, sys.argv[1:]):
        for entry in (*ENTRIES, *attention(capability)):
            try:
                print(entry.compile(capability), flush=True)  # noqa: T201
            except Exception as error:
                failed += 1
                print(f"{entry.kernel.__name__} for sm_{capability}: {error!r}")  # noqa: T201
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
