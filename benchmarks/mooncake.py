"""A stretch of Mooncake's conversation trace, made small enough for this machine. Pure.

The trace tells lengths, arrivals and which blocks of 512 tokens are equal (`data/README.md`). Here
a block becomes `block_tokens` tokens, drawn from its id, and lengths shrink alike: which prompts
share how many blocks stays exactly as it was.
"""

import csv
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data" / "mooncake_conversation.csv"
TRACE_BLOCK = 512
"""Tokens in a block of the trace."""
FIRST_BLOCK = 0
"""All prompts of the trace begin with it."""

Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One request, as the trace has it."""

    at_s: float
    """Since the first of the stretch."""
    input_length: int
    output_length: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Stretch:
    lines: list[Line]
    first_new: int
    """Blocks with smaller ids had been asked for before the stretch began."""

    def past(self) -> list[Blocks]:
        """What the lines share with the time before: the longest beginnings, the oldest first."""
        found = {_older(line.blocks, self.first_new) for line in self.lines}
        shorter = {blocks[:length] for blocks in found for length in range(len(blocks))}
        return sorted(found - shorter, key=lambda blocks: blocks[-1])


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as it is sent."""

    at_s: float
    prompt: list[int]
    max_tokens: int


def read(path: Path = DATA) -> Stretch:
    """The file's lines in order.

    Raises:
        ValueError: a line whose blocks do not follow from those before it.
    """
    with path.open() as source:
        rows = list(csv.DictReader(source))
    first_new = next_new = int(rows[0]["new_from"])
    start_ms = int(rows[0]["timestamp_ms"])
    lines = []
    for row in rows:
        length = int(row["input_length"])
        known = (FIRST_BLOCK, *_runs(row["known"]))
        num_new = math.ceil(length / TRACE_BLOCK) - len(known)
        if num_new < 0 or row["new_from"] != (str(next_new) if num_new else ""):
            raise ValueError(f"{num_new} new blocks from {next_new} on do not fit {row}")
        blocks = (*known, *range(next_new, next_new + num_new))
        next_new += num_new
        at_s = (int(row["timestamp_ms"]) - start_ms) / 1e3
        lines.append(Line(at_s, length, int(row["output_length"]), blocks))
    return Stretch(lines, first_new)


def _runs(text: str) -> Iterator[int]:
    """`3-5 9` is 3, 4, 5, 9."""
    for run in text.split():
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _older(blocks: Blocks, first_new: int) -> Blocks:
    count = next((i for i, block in enumerate(blocks) if block >= first_new), len(blocks))
    return blocks[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How the trace is made small."""

    block_tokens: int
    """What a block of 512 tokens becomes."""
    speed: float
    """Arrivals come so many times as fast."""
    tokens: range
    """Ids that prompts are made of."""

    def requests(self, lines: Sequence[Line]) -> list[Request]:
        return [
            Request(
                line.at_s / self.speed,
                self._tokens_of(line.blocks)[: self._length(line.input_length)],
                self._length(line.output_length),
            )
            for line in lines
        ]

    def past(self, beginnings: Sequence[Blocks]) -> list[Request]:
        """One request for each, that leaves all of its blocks in a cache."""
        return [Request(0.0, self._tokens_of(blocks), 1) for blocks in beginnings]

    def _tokens_of(self, blocks: Blocks) -> list[int]:
        return [
            token
            for block in blocks
            for token in random.Random(block).choices(self.tokens, k=self.block_tokens)
        ]

    def _length(self, trace_length: int) -> int:
        return max(1, round(trace_length * self.block_tokens / TRACE_BLOCK))
