"""How a step's attention is divided among a GPU's programs: lists for kernels, made on the host.

Pure index arithmetic in numpy. Prompt chunks become *tiles* of a few tokens, single tokens *pieces*
of their sequence's keys. Both are cut further over their keys where there would be too few, and
what was cut is merged from a workspace. Both lists are sorted by how many keys an entry reads, most
first, so that what a processor takes last is small. The fields of an entry are those that
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
    """How the keys of queries are divided among programs."""

    programs: int
    """That should have work at once, over all KV heads of one entry: entries to aim at."""
    min_keys: int
    """A part of fewer keys costs more to merge than it saves."""
    multiple: int
    """Parts begin at multiples of so many positions, but for the first of a window."""


@dataclass(frozen=True, slots=True)
class Work:
    entries: Int32s
    """Tiles or pieces. The last two fields of each are its place in the workspace (-1: what it
    computes is all there is of its queries) and, before that, the key behind its last."""
    merges: Int32s
    """[rows, 4]: batch row, first place, number of places, distance between them."""
    num_places: int

    @property
    def is_split(self) -> bool:
        return self.num_places > 0


def tile_chunks(spans: PlacedSpans, tokens: int, window: int | None, split: Split) -> Work:
    """Tiles [tiles, 7]: batch row, number of tokens (at most `tokens`), slot, first token's
    position, first key, key behind the last, place. A tile is split over its keys where there are
    fewer than there are programs: a short chunk behind a long prefix."""
    counts = -(-spans.lengths // tokens)
    span = np.repeat(np.arange(len(spans)), counts)
    offset = _ranks(counts) * tokens
    length = np.minimum(spans.lengths[span] - offset, tokens)
    row, position = spans.rows[span] + offset, spans.starts[span] + offset
    parts = _divide(_first_key(position, window), position + length, split, length)
    tile = parts.owner
    entries = np.stack(
        [row[tile], length[tile], spans.slots[span][tile], position[tile],
         parts.first, parts.last, parts.place], axis=1,
    )  # fmt: skip
    merged = np.repeat(np.arange(len(row)), np.where(parts.counts > 1, length, 0))
    token = _ranks(np.where(parts.counts > 1, length, 0))
    merges = np.stack(
        [row[merged] + token, parts.first_place[merged] + token, parts.counts[merged],
         length[merged]], axis=1,
    )  # fmt: skip
    return _sorted(entries, merges, parts)


def split_singles(spans: PlacedSpans, window: int | None, split: Split) -> Work:
    """Pieces [pieces, 5]: batch row, slot, first key, key behind the last, place; at most
    `len(spans) + split.programs` of them. Every span has its entry in `merges`, in order."""
    parts = _divide(
        _first_key(spans.starts, window), spans.starts + 1, split, np.ones_like(spans.starts)
    )
    span = parts.owner
    entries = np.stack(
        [spans.rows[span], spans.slots[span], parts.first, parts.last, parts.place], axis=1
    )
    ones = np.ones_like(spans.rows)
    merges = np.stack([spans.rows, parts.first_place, parts.counts, ones], axis=1)
    return _sorted(entries, merges, parts)


def pad(work: Work, batch_size: int, max_pieces: int) -> Work:
    """The same for a batch of `batch_size` rows: pieces of nobody, and rows that become zero."""
    assert len(work.merges) <= batch_size, f"{len(work.merges)} rows in a batch of {batch_size}"
    pieces = np.full((max_pieces, work.entries.shape[1]), -1, dtype=np.int32)
    pieces[: len(work.entries)] = work.entries
    merges = np.zeros((batch_size, work.merges.shape[1]), dtype=np.int32)
    merges[:, 0] = np.arange(batch_size)
    merges[: len(work.merges)] = work.merges
    return Work(pieces, merges, work.num_places)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Ranges of keys, cut into parts."""

    owner: Int64s
    """Of each part, the range that it is of."""
    first: Int64s
    last: Int64s
    place: Int64s
    counts: Int64s
    """Of each range, its parts."""
    first_place: Int64s
    num_places: int


def _divide(low: Int64s, high: Int64s, split: Split, width: Int64s) -> _Parts:
    """Cut ranges [low, high) into parts of about equally many keys; each part of a range that is
    cut takes `width` places."""
    base = low // split.multiple * split.multiple
    keys = high - base
    fair = -(-int(keys.sum()) // split.programs)
    counts = -(-keys // max(fair, split.min_keys))
    each = -(-keys // (counts * split.multiple)) * split.multiple
    counts = -(-keys // each)
    places = np.where(counts > 1, counts * width, 0)
    first_place = np.cumsum(places) - places

    owner = np.repeat(np.arange(len(low)), counts)
    rank = _ranks(counts)
    begin = base[owner] + rank * each[owner]
    place = np.where(counts[owner] > 1, first_place[owner] + rank * width[owner], -1)
    return _Parts(
        owner,
        np.maximum(begin, low[owner]),
        np.minimum(begin + each[owner], high[owner]),
        place,
        counts,
        first_place,
        int(places.sum()),
    )


def _sorted(entries: Int64s, merges: Int64s, parts: _Parts) -> Work:
    order = np.argsort(parts.first - parts.last, kind="stable")
    return Work(entries[order].astype(np.int32), merges.astype(np.int32), parts.num_places)


def _first_key(position: Int64s, window: int | None) -> Int64s:
    """The first that the token at `position` sees."""
    return np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)


def _ranks(counts: Int64s) -> Int64s:
    """0, 1, ..., count - 1 for each count, one behind the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
