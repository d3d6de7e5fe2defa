"""Heads from ranks to ranks: every byte once, from a rank that has it, for any two nodes."""

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import PeerMemory
from transfer.head_ranges import MAX_RANKS, HeadRange, Piece, cut, ranges_problem
from transfer.layout import common_rows, page_rows

Ranges = list[HeadRange]


def evenly(num_heads: int, size: int) -> Ranges:
    """What the ranks of a node hold: as even as possible, or one head each with replicas."""
    if size > num_heads:
        return [HeadRange(rank * num_heads // size, 1) for rank in range(size)]
    share, more = divmod(num_heads, size)
    counts = [share + (rank < more) for rank in range(size)]
    return [HeadRange(sum(counts[:rank]), count) for rank, count in enumerate(counts)]


@st.composite
def divided(draw: st.DrawFn, num_heads: int) -> Ranges:
    """Any ranges that a node may have: cut anywhere, each range on some ranks, in any order."""
    inner = draw(st.sets(st.integers(1, max(num_heads - 1, 1)), max_size=min(num_heads - 1, 5)))
    borders = [0, *sorted(inner), num_heads]
    parts = [HeadRange(a, b - a) for a, b in pairwise(borders)]
    copies = draw(st.lists(st.integers(1, 3), min_size=len(parts), max_size=len(parts)))
    ranks = [part for part, count in zip(parts, copies, strict=True) for _ in range(count)]
    return list(draw(st.permutations(ranks)))


@st.composite
def two_nodes(draw: st.DrawFn) -> tuple[int, Ranges, Ranges]:
    num_heads = draw(st.integers(1, 9))
    return num_heads, draw(divided(num_heads)), draw(divided(num_heads))


def check_heads(num_heads: int, sources: Ranges, targets: Ranges) -> tuple[Piece, ...]:
    pieces = cut(sources, targets)
    written = Counter(
        (p.target, head) for p in pieces for head in range(p.heads.first, p.heads.end)
    )
    wanted = {(rank, h) for rank, t in enumerate(targets) for h in range(t.first, t.end)}
    assert set(written) == wanted
    assert set(written.values()) == {1}
    for piece in pieces:
        assert sources[piece.source].common(piece.heads) == piece.heads
    assert len({(piece.source, piece.target) for piece in pieces}) == len(pieces)
    return pieces


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 8])
def test_every_pair_of_sizes_writes_each_head_of_each_rank_once(num_heads: int) -> None:
    for source_size, target_size in product(range(1, 9), repeat=2):
        sources, targets = evenly(num_heads, source_size), evenly(num_heads, target_size)
        assert ranges_problem(sources, num_heads) is None
        pieces = check_heads(num_heads, sources, targets)
        if sources == targets:
            assert [(piece.source, piece.target) for piece in pieces] == [
                (rank, rank) for rank in range(source_size)
            ]


PAGES, LAYERS, TILE = 3, 2, 4


def memory(heads: HeadRange, base: int) -> PeerMemory:
    page_bytes = LAYERS * 2 * heads.count * TILE
    return PeerMemory(
        agent_name="a",
        metadata=b"",
        base_address=base,
        num_pages=PAGES,
        page_bytes=page_bytes,
        first_head=heads.first,
        num_heads=heads.count,
    )


@settings(max_examples=60, deadline=None)
@given(two_nodes())
def test_every_byte_of_a_page_is_written_once_and_is_right(
    nodes: tuple[int, Ranges, Ranges],
) -> None:
    num_heads, sources, targets = nodes
    assert ranges_problem(sources, num_heads) is None
    pieces = check_heads(num_heads, sources, targets)
    generator = np.random.default_rng(1)
    shape = (PAGES, LAYERS, 2, num_heads, TILE)
    there = generator.integers(0, 256, shape, dtype=np.uint8)
    pools = [there[:, :, :, s.first : s.end].copy().reshape(-1) for s in sources]
    landed = [np.zeros(PAGES * LAYERS * 2 * t.count * TILE, np.uint8) for t in targets]
    times = [np.zeros(len(pool), int) for pool in landed]
    source_pages, target_pages = (2, 0), (0, 1)
    for piece in pieces:
        here, peer = memory(sources[piece.source], 1000), memory(targets[piece.target], 5000)
        if sources[piece.source] == targets[piece.target]:
            rows = page_rows(here, source_pages), page_rows(peer, target_pages)
        else:
            rows = common_rows(here, peer, LAYERS, source_pages, target_pages)
        for (start, length, _), (end, same, _) in zip(
            rows[0].tolist(), rows[1].tolist(), strict=True
        ):
            assert length == same
            place = slice(end - 5000, end - 5000 + length)
            landed[piece.target][place] = pools[piece.source][start - 1000 : start - 1000 + length]
            times[piece.target][place] += 1
    for rank, heads in enumerate(targets):
        counts = times[rank].reshape(PAGES, -1)
        assert (counts[list(target_pages)] == 1).all()
        assert (counts[2] == 0).all()
        pages = landed[rank].reshape(PAGES, LAYERS, 2, heads.count, TILE)
        expected = there[list(source_pages)][:, :, :, heads.first : heads.end]
        assert (pages[list(target_pages)] == expected).all()


@settings(max_examples=40, deadline=None)
@given(two_nodes())
def test_source_replicas_take_turns(nodes: tuple[int, Ranges, Ranges]) -> None:
    _, sources, targets = nodes
    whole = [HeadRange(0, sum(part.count for part in set(sources)))] * len(targets)
    sent = Counter(piece.source for piece in cut(sources, whole))
    for heads, copies in Counter(sources).items():
        loads = [sent[rank] for rank, held in enumerate(sources) if held == heads]
        assert sum(loads) == len(targets)
        assert max(loads) - min(loads) <= 1, copies


@pytest.mark.parametrize(
    ("ranges", "word"),
    [
        ([], "ranks"),
        ([(0, 1)] * (MAX_RANKS + 1), "ranks"),
        ([(0, 0), (0, 4)], "0 KV heads"),
        ([(0, -1), (0, 4)], "-1 KV heads"),
        ([(-1, 5)], "negative"),
        ([(0, 2), (3, 1)], "no rank has KV head 2"),
        ([(1, 3)], "no rank has KV head 0"),
        ([(0, 3)], "hold 3 KV heads, not 4"),
        ([(0, 5)], "hold 5 KV heads, not 4"),
        ([(0, 2), (1, 3)], "not equal"),
        ([(0, 4), (0, 2), (2, 2)], "not equal"),
        ([(0, 2), (2, 2), (2, 1)], "not equal"),
        ([(0, 2), (2, 1 << 62)], "not 4"),
    ],
)
def test_ranges_that_no_node_has_are_refused(ranges: list[tuple[int, int]], word: str) -> None:
    problem = ranges_problem([HeadRange(*heads) for heads in ranges], 4)
    assert problem is not None
    assert word in problem


def test_common_heads() -> None:
    assert HeadRange(0, 4).common(HeadRange(2, 9)) == HeadRange(2, 2)
    assert HeadRange(2, 1).common(HeadRange(0, 8)) == HeadRange(2, 1)
    assert HeadRange(0, 2).common(HeadRange(2, 2)) is None
