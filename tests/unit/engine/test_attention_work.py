"""Lists of tiles and pieces: every query and every visible key in exactly one, evenly divided."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.attention.work import (
    PlacedSpans,
    Split,
    Work,
    pad,
    split_singles,
    tile_chunks,
)

windows = st.none() | st.integers(1, 300)
spans = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 2000), st.integers(2, 300)), min_size=1
)
splits = st.builds(
    Split,
    programs=st.integers(1, 200),
    min_keys=st.integers(1, 512),
    multiple=st.sampled_from([1, 16, 64]),
)


def visible(start: int, window: int | None) -> range:
    return range(0 if window is None else max(0, start + 1 - window), start + 1)


def check_parts(parts: list[tuple[int, int]], keys: range, split: Split) -> None:
    """Ranges that follow each other over all of `keys`, cut where a kernel's tiles begin."""
    edges = [parts[0][0], *(last for _, last in parts)]
    assert (edges[0], edges[-1]) == (keys.start, keys.stop)
    assert [first for first, _ in parts] == edges[:-1], "no gap and no overlap"
    assert all(edge % split.multiple == 0 for edge in edges[1:-1])
    assert all(first < last for first, last in pairwise(edges))


def check_places(work: Work, owners: dict[int, list[int]]) -> None:
    """`owners` are the places that were left for each row: the merges name them, and each place
    belongs to one row."""
    merged = {row: (first, count, step) for row, first, count, step in work.merges.tolist()}
    for row, places in owners.items():
        if places:
            first, count, step = merged[row]
            assert places == list(range(first, first + count * step, step))
    places = [place for row in owners.values() for place in row]
    assert sorted(places) == list(range(work.num_places)), "dense, and nobody shares one"


@settings(max_examples=200, deadline=None)
@given(spans, st.integers(1, 128), windows, splits)
def test_every_key_of_every_token_of_a_chunk_is_in_one_tile(
    chunks: list[tuple[int, int, int]], tokens: int, window: int | None, split: Split
) -> None:
    wanted: dict[int, tuple[int, int]] = {}
    row = 0
    for slot, start, length in chunks:
        wanted |= {row + i: (slot, start + i) for i in range(length)}
        row += length
    work = tile_chunks(PlacedSpans.of(chunks), tokens, window, split)
    tiles: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    got: dict[int, tuple[int, int]] = {}
    for row, count, slot, position, first, last, place in work.entries.tolist():
        assert 1 <= count <= tokens
        got |= {row + i: (slot, position + i) for i in range(count)}
        tiles.setdefault((row, count), []).append((first, last, place))
    assert got == wanted
    assert sum(count for _, count in tiles) == len(wanted), "each token is in one row of tiles"
    owners: dict[int, list[int]] = {}
    for (row, count), parts in tiles.items():
        parts.sort()
        position = wanted[row][1]
        keys = range(visible(position, window).start, position + count)
        check_parts([(first, last) for first, last, _ in parts], keys, split)
        alone = len(parts) == 1
        assert all((place < 0) == alone for _, _, place in parts)
        for i in range(count):
            owners[row + i] = [] if alone else [place + i for _, _, place in parts]
    check_places(work, owners)
    assert len(work.entries) <= len(tiles) + split.programs
    keys_read = work.entries[:, 5] - work.entries[:, 4]
    assert (np.diff(keys_read) <= 0).all(), "longest work first"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3000) | st.just(100_000), min_size=1, max_size=40), windows, splits)
def test_every_visible_key_is_in_one_piece(
    starts: list[int], window: int | None, split: Split
) -> None:
    singles = PlacedSpans.of([(slot, start, 1) for slot, start in enumerate(starts)])
    work = split_singles(singles, window, split)
    by_row: dict[int, list[list[int]]] = {row: [] for row in range(len(starts))}
    for row, *rest in work.entries.tolist():
        by_row[row].append(rest)
    assert [merge[0] for merge in work.merges.tolist()] == list(by_row)
    owners = {}
    for row, _, count, _ in work.merges.tolist():
        pieces = sorted(by_row[row], key=lambda piece: piece[1])
        assert len(pieces) == count >= 1
        check_parts(
            [(first, last) for _, first, last, _ in pieces], visible(starts[row], window), split
        )
        assert {slot for slot, *_ in pieces} == {row}
        assert all((place < 0) == (count == 1) for *_, place in pieces)
        owners[row] = [place for *_, place in pieces if place >= 0]
    check_places(work, owners)
    assert len(work.entries) <= len(starts) + split.programs, "what buffers are sized for"


def test_a_short_chunk_behind_a_long_prefix_is_divided() -> None:
    work = tile_chunks(
        PlacedSpans.of([(0, 40_000, 20)]), 16, None, Split(programs=16, min_keys=1024, multiple=64)
    )
    assert len(work.entries) >= 16
    assert work.merges[:, 0].tolist() == list(range(20))
    long_chunk = PlacedSpans.of([(0, 4000, 2048)])
    work = tile_chunks(long_chunk, 16, None, Split(programs=16, min_keys=1024, multiple=64))
    assert not work.is_split, "there are tiles enough"


def test_pieces_are_even_however_unequal_the_sequences_are() -> None:
    starts = [99_999] + [200] * 63
    work = split_singles(
        PlacedSpans.of([(slot, start, 1) for slot, start in enumerate(starts)]),
        None,
        Split(programs=66, min_keys=256, multiple=64),
    )
    sizes = work.entries[:, 3] - work.entries[:, 2]
    assert work.merges[0, 2] >= 58, "the long one is divided among nearly all processors"
    assert (work.merges[1:, 2] == 1).all(), "the short ones are not divided"
    assert sizes.max() <= 2 * sizes.sum() / 66
    assert (np.diff(sizes) <= 0).all(), "longest first"


def test_few_keys_are_not_divided() -> None:
    split = Split(programs=100, min_keys=256, multiple=64)
    assert not split_singles(PlacedSpans.of([(0, 255, 1)]), None, split).is_split
    assert split_singles(PlacedSpans.of([(0, 511, 1)]), None, split).merges.tolist() == [
        [0, 0, 2, 1]
    ]


def test_a_window_is_all_that_is_divided() -> None:
    split = Split(programs=4, min_keys=16, multiple=16)
    work = split_singles(PlacedSpans.of([(3, 1000, 1)]), 50, split)
    assert sorted(work.entries[:, 2:4].tolist()) == [
        [951, 960], [960, 976], [976, 992], [992, 1001],
    ]  # fmt: skip


def test_padding() -> None:
    split = Split(programs=4, min_keys=16, multiple=16)
    work = pad(split_singles(PlacedSpans.of([(7, 40, 1), (8, 3, 1)]), None, split), 4, 8)
    assert work.entries.shape == (8, 5)
    assert work.merges.tolist() == [[0, 0, 3, 1], [1, 3, 1, 1], [2, 0, 0, 0], [3, 0, 0, 0]]
    assert (work.entries[4:, 0] == -1).all()
    with pytest.raises(AssertionError, match="2 rows in a batch of 1"):
        pad(Work(work.entries, work.merges[:2], 0), 1, 8)
