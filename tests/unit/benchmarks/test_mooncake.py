"""The trace's stretch is whole, keeps its structure when it shrinks, and its bound is exact."""

import random
from itertools import takewhile
from pathlib import Path

import pytest

from benchmarks.infinite_cache import InfiniteCache, saved
from benchmarks.mooncake import DATA, Scale, read

PAGE = 16
SCALE = Scale(block_tokens=PAGE, speed=2.0, tokens=range(3, 300))


def common(left: list[int], right: list[int]) -> int:
    """Tokens at the beginning that are equal."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_the_stretch_is_whole() -> None:
    stretch = read()
    lines = stretch.lines
    assert len(lines) == 260
    assert lines[-1].at_s == 78.0
    assert [line.at_s for line in lines] == sorted(line.at_s for line in lines)
    known = {0}
    shared = 0
    for line in lines:
        older = [block for block in line.blocks if block < stretch.first_new]
        assert line.blocks[: len(older)] == tuple(older)
        shared += sum(block in known or block < stretch.first_new for block in line.blocks)
        known.update(line.blocks)
    assert sum(len(line.blocks) for line in lines) == 6092
    assert round(shared / 6092, 3) == 0.408


def test_prompts_share_exactly_what_their_blocks_do() -> None:
    lines = read().lines
    requests = SCALE.requests(lines)
    chance = random.Random(1)
    pairs = [(chance.randrange(260), chance.randrange(260)) for _ in range(2000)]
    for i, j in pairs:
        left, right = lines[i].blocks, lines[j].blocks
        blocks = sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(left, right, strict=False)))
        shorter = min(len(requests[i].prompt), len(requests[j].prompt))
        shared = common(requests[i].prompt, requests[j].prompt)
        least = min(blocks * PAGE, shorter)
        assert least <= shared < least + PAGE  # the next block's first tokens may happen to agree


def test_the_past_covers_what_lines_share_with_it_and_nothing_twice() -> None:
    stretch = read()
    past = stretch.past()
    assert all(block < stretch.first_new for blocks in past for block in blocks)
    for blocks in past:
        assert not any(other[: len(blocks)] == blocks for other in past if other is not blocks)
    beginnings = {blocks[:n] for blocks in past for n in range(1, len(blocks) + 1)}
    for line in stretch.lines:
        older = tuple(block for block in line.blocks if block < stretch.first_new)
        assert older in beginnings


def test_with_pages_as_large_as_blocks_the_bound_is_the_traces_own() -> None:
    stretch = read()
    cache = InfiniteCache(PAGE)
    saved([request.prompt for request in SCALE.past(stretch.past())], cache)
    requests = SCALE.requests(stretch.lines)
    known = {block for blocks in stretch.past() for block in blocks}
    expected = 0
    for line, request in zip(stretch.lines, requests, strict=True):
        leading = sum(1 for _ in takewhile(lambda b: b in known, line.blocks))
        expected += PAGE * min(leading, (len(request.prompt) - 1) // PAGE)
        known.update(line.blocks[: len(request.prompt) // PAGE])
    assert saved([request.prompt for request in requests], cache) == expected


def test_a_line_that_does_not_follow_is_refused(tmp_path: Path) -> None:
    lines = DATA.read_text().splitlines(keepends=True)
    broken = tmp_path / "broken.csv"
    broken.write_text("".join([*lines[:3], *lines[4:]]))
    with pytest.raises(ValueError, match="do not fit"):
        read(broken)


def test_an_infinite_cache_never_gives_the_page_of_the_last_token() -> None:
    cache = InfiniteCache(4)
    tokens = list(range(12))
    assert cache.hit(tokens) == 0
    cache.add(tokens)
    assert [cache.hit(tokens[:n]) for n in range(1, 13)] == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8]
    assert cache.hit([*tokens, 99]) == 12
    assert cache.hit([99, *tokens]) == 0
    assert len(cache) == 3
