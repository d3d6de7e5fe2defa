"""Lists of tiles and pieces: every query and every visible key in exactly one, evenly divided."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.attention.work import (
    DecodeWork,
    PlacedSpans,
    Split,
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


@settings(max_examples=200, deadline=None)
@given(spans, st.integers(1, 128), windows)
def test_every_token_of_a_chunk_is_in_one_tile(
    chunks: list[tuple[int, int, int]], tokens: int, window: int | None
) -> None:
    wanted = set()
    row = 0
    for slot, start, length in chunks:
        wanted |= {(row + i, slot, start + i) for i in range(length)}
        row += length
    tiles = tile_chunks(PlacedSpans.of(chunks), tokens, window)
    assert tiles.dtype == np.int32
    got = [
        (row + i, slot, position + i)
        for row, count, slot, position in tiles.tolist()
        for i in range(count)
    ]
    assert len(got) == len(wanted)
    assert set(got) == wanted
    assert tiles[:, 1].max() <= tokens
    keys = [
        position + count if window is None else min(position + count, window + count)
        for _, count, _, position in tiles.tolist()
    ]
    assert keys == sorted(keys, reverse=True), "longest work first"


def visible(start: int, window: int | None) -> range:
    return range(0 if window is None else max(0, start + 1 - window), start + 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3000) | st.just(100_000), min_size=1, max_size=40), windows, splits)
def test_every_visible_key_is_in_one_piece(
    starts: list[int], window: int | None, split: Split
) -> None:
    singles = PlacedSpans.of([(slot, start, 1) for slot, start in enumerate(starts)])
    work = split_singles(singles, window, split)
    by_row: dict[int, list[list[int]]] = {row: [] for row in range(len(starts))}
    for piece in work.pieces.tolist():
        by_row[piece[0]].append(piece)
    places = []
    for row, first_place, count in work.merges.tolist():
        pieces = sorted(by_row[row], key=lambda piece: piece[2])
        assert len(pieces) == count >= 1
        edges = [pieces[0][2], *(piece[3] for piece in pieces)]
        keys = visible(starts[row], window)
        assert (edges[0], edges[-1]) == (keys.start, keys.stop)
        assert [piece[2] for piece in pieces] == edges[:-1], "no gap and no overlap"
        assert all(edge % split.multiple == 0 for edge in edges[1:-1])
        assert all(first < last for first, last in pairwise(edges))
        assert {piece[1] for piece in pieces} == {row}
        if count == 1:
            assert pieces[0][4] == -1
        else:
            assert [piece[4] for piece in pieces] == list(range(first_place, first_place + count))
            places += [piece[4] for piece in pieces]
    assert sorted(places) == list(range(len(places))), "places are dense and nobody shares one"
    assert work.num_places == len(places)
    assert len(work.pieces) <= len(starts) + split.programs, "what buffers are sized for"
    assert work.is_split == bool(places)


def test_pieces_are_even_however_unequal_the_sequences_are() -> None:
    starts = [99_999] + [200] * 63
    work = split_singles(
        PlacedSpans.of([(slot, start, 1) for slot, start in enumerate(starts)]),
        None,
        Split(programs=66, min_keys=256, multiple=64),
    )
    sizes = work.pieces[:, 3] - work.pieces[:, 2]
    assert work.merges[0, 2] >= 58, "the long one is divided among nearly all processors"
    assert (work.merges[1:, 2] == 1).all(), "the short ones are not divided"
    assert sizes.max() <= 2 * sizes.sum() / 66
    assert (np.diff(sizes) <= 0).all(), "longest first"


def test_few_keys_are_not_divided() -> None:
    split = Split(programs=100, min_keys=256, multiple=64)
    assert not split_singles(PlacedSpans.of([(0, 255, 1)]), None, split).is_split
    assert split_singles(PlacedSpans.of([(0, 511, 1)]), None, split).merges.tolist() == [[0, 0, 2]]


def test_a_window_is_all_that_is_divided() -> None:
    split = Split(programs=4, min_keys=16, multiple=16)
    work = split_singles(PlacedSpans.of([(3, 1000, 1)]), 50, split)
    assert sorted(work.pieces[:, 2:4].tolist()) == [
        [951, 960], [960, 976], [976, 992], [992, 1001],
    ]  # fmt: skip


def test_padding() -> None:
    split = Split(programs=4, min_keys=16, multiple=16)
    work = pad(split_singles(PlacedSpans.of([(7, 40, 1), (8, 3, 1)]), None, split), 4, 8)
    assert work.pieces.shape == (8, 5)
    assert work.merges.tolist() == [[0, 0, 3], [1, 3, 1], [2, 0, 0], [3, 0, 0]]
    assert (work.pieces[4:, 0] == -1).all()
    with pytest.raises(AssertionError, match="2 rows in a batch of 1"):
        pad(DecodeWork(work.pieces, work.merges[:2]), 1, 8)
