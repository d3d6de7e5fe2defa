"""Stand-ins for a node's body in scheduler tests: KV memory, a deterministic model, a fabric.

KV content is modelled exactly: the KV of a position is a hash over all tokens up to it, computed
from what the page table says the position before holds. A page that is freed too early, written
late or read too soon therefore changes tokens, as it would in a real model, and so does a wrong
adapter at any position.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.messages import Incarnation, Room
from common.plan import Batch, BatchResult, Row, Sample, Write

VOCAB = 97
PAGE = 4
_MODULUS = (1 << 61) - 1


def advance(state: int, token: int, adapter: str = "") -> int:
    """`adapter`: the digest of what the position is computed with; empty for the base model."""
    salt = zlib.crc32(adapter.encode()) * VOCAB if adapter else 0
    return (state * 1_000_003 + token + 1 + salt) % _MODULUS


def next_token(state: int) -> int:
    return (state * 2_654_435_761 % _MODULUS) % VOCAB


def reference(prompt: list[int], count: int, adapter: str = "") -> list[int]:
    """What an undisturbed greedy run answers."""
    state, output = 7, []
    for token in prompt:
        state = advance(state, token, adapter)
    for _ in range(count):
        output.append(next_token(state))
        state = advance(state, output[-1], adapter)
    return output


class Violation(AssertionError):
    """Something happened that the design excludes."""


@dataclass
class Memory:
    """One node's pages: content of each position, or None."""

    num_pages: int
    cells: list[list[int | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [[None] * PAGE for _ in range(self.num_pages)]


class FakeRunner:
    """Computes rows against `Memory` the way the real runner does against tensors."""

    def __init__(self, memory: Memory, lora_slots: Mapping[int, str]) -> None:
        """`lora_slots`: slot -> digest of what is in it; without those that are being filled."""
        self.memory = memory
        self.lora_slots = lora_slots
        self.tables: dict[int, list[int]] = {}
        self.fail_next = False

    def run(self, batch: Batch) -> BatchResult:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("planted engine failure")
        if not batch.rows or len({row.slot for row in batch.rows}) != len(batch.rows):
            raise Violation("an empty batch, or one slot twice")
        return BatchResult(tuple(self._row(row) for row in batch.rows))

    def _row(self, row: Row) -> Sample | None:
        if row.init is not None:
            self.tables[row.slot] = []
        table = self.tables[row.slot]
        table += row.new_pages
        if row.lora_slot is not None and row.lora_slot not in self.lora_slots:
            raise Violation(f"computed with slot {row.lora_slot}, which is empty or being filled")
        adapter = "" if row.lora_slot is None else self.lora_slots[row.lora_slot]
        state = 7 if row.start == 0 else self._read(table, row.start - 1)
        for offset, token in enumerate(row.token_ids):
            state = advance(state, token, adapter)
            position = row.start + offset
            self.memory.cells[table[position // PAGE]][position % PAGE] = state
        return None if row.sample_index is None else Sample(next_token(state))

    def _read(self, table: list[int], position: int) -> int:
        value = self.memory.cells[table[position // PAGE]][position % PAGE]
        return -1 if value is None else value


@dataclass
class PostedWrite:
    """A write under way: it lands (or fails) at some later time, its notification later still."""

    source: Incarnation
    write: Write
    due: float
    needs_source: bool = False
    """It goes on only while its process runs: it was stopped before, or within, the post."""
    held_since: float | None = None
    """A cut keeps it back."""
    content: list[list[int | None]] | None = None
    """Once its process has ended: what the kernel still sends."""

    @property
    def room(self) -> Room:
        return self.write.room
