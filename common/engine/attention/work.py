"""How a step's attention is divided among a GPU's programs: lists for kernels, made on the host.

Pure index arithmetic in numpy. Prompt chunks become *tiles* of a few tokens, single tokens *pieces*
of their sequence's keys. Both lists are sorted by how many keys an entry reads, most first, so that
what a processor takes last is small. The fields of an entry are those that
`kernels.prefill_attention` and `kernels.decode_attention` name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlacedSpans:
    """Spans of tokens with their place in the batch, one entry a span."""

    rows: Int64s
    """Of the first token."""
    slots: Int64s
    starts: Int64s
    lengths: Int64s

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int, int]]) -> "PlacedSpans":
        """From (slot, start, length), whose tokens follow each other in the batch."""
        slots, starts, lengths = np.array(spans, dtype=np.int64).reshape(-1, 3).T
        return cls(np.cumsum(lengths) - lengths, slots, starts, lengths)

    def where(self, chosen: NDArray[np.bool_]) -> "PlacedSpans":
        return PlacedSpans(
            self.rows[chosen], self.slots[chosen], self.starts[chosen], self.lengths[chosen]
        )

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Split:
    """How keys of single tokens are divided."""

    programs: int
    """That should have work at once, over all KV heads of one piece: pieces to aim at."""
    min_keys: int
    """A piece of fewer keys costs more to merge than it saves."""
    multiple: int
    """Pieces begin at multiples of so many positions, but for a sequence's first."""


@dataclass(frozen=True, slots=True)
class DecodeWork:
    pieces: Int32s
    """[pieces, 5]: batch row, slot, first key, key behind the last, place in the workspace (-1: no
    other piece)."""
    merges: Int32s
    """[spans, 3]: batch row, first place in the workspace, number of pieces."""

    @property
    def num_places(self) -> int:
        return int(self.pieces[:, 4].max()) + 1

    @property
    def is_split(self) -> bool:
        return bool((self.merges[:, 2] > 1).any())


def tile_chunks(spans: PlacedSpans, tokens: int, window: int | None) -> Int32s:
    """[tiles, 4]: batch row, number of tokens (at most `tokens`), slot, first token's position."""
    counts = -(-spans.lengths // tokens)
    span = np.repeat(np.arange(len(spans)), counts)
    offset = _ranks(counts) * tokens
    length = np.minimum(spans.lengths[span] - offset, tokens)
    position = spans.starts[span] + offset
    keys = position + length
    if window is not None:
        keys = np.minimum(keys, window + length)
    tiles = np.stack([spans.rows[span] + offset, length, spans.slots[span], position], axis=1)
    return tiles[np.argsort(-keys, kind="stable")].astype(np.int32)


def split_singles(spans: PlacedSpans, window: int | None, split: Split) -> DecodeWork:
    """Pieces of about equally many keys; at most `len(spans) + split.programs` of them."""
    high = spans.starts + 1
    low = np.zeros_like(high) if window is None else np.maximum(high - window, 0)
    base = low // split.multiple * split.multiple
    keys = high - base
    fair = -(-int(keys.sum()) // split.programs)
    counts = -(-keys // max(fair, split.min_keys))
    each = -(-keys // (counts * split.multiple)) * split.multiple
    counts = -(-keys // each)
    places = np.where(counts > 1, counts, 0)
    first_place = np.cumsum(places) - places

    span = np.repeat(np.arange(len(spans)), counts)
    rank = _ranks(counts)
    begin = base[span] + rank * each[span]
    first = np.maximum(begin, low[span])
    last = np.minimum(begin + each[span], high[span])
    place = np.where(counts[span] > 1, first_place[span] + rank, -1)
    pieces = np.stack([spans.rows[span], spans.slots[span], first, last, place], axis=1)
    merges = np.stack([spans.rows, first_place, counts], axis=1)
    order = np.argsort(first - last, kind="stable")
    return DecodeWork(pieces[order].astype(np.int32), merges.astype(np.int32))


def pad(work: DecodeWork, batch_size: int, max_pieces: int) -> DecodeWork:
    """The same for a batch of `batch_size` rows: pieces of nobody, and rows that become zero."""
    assert len(work.merges) <= batch_size, f"{len(work.merges)} rows in a batch of {batch_size}"
    pieces = np.full((max_pieces, work.pieces.shape[1]), -1, dtype=np.int32)
    pieces[: len(work.pieces)] = work.pieces
    merges = np.zeros((batch_size, work.merges.shape[1]), dtype=np.int32)
    merges[:, 0] = np.arange(batch_size)
    merges[: len(work.merges)] = work.merges
    return DecodeWork(pieces, merges)


def _ranks(counts: Int64s) -> Int64s:
    """0, 1, ..., count - 1 for each count, one behind the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
