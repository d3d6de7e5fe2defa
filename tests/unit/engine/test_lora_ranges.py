"""There is always room in the pool, and no slot's rows are another's."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.engine.lora.ranges import GRANULE, RankRange, RankRanges


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    slots, max_rank = draw(st.integers(1, 6)), draw(st.integers(1, 256))
    take = st.tuples(st.integers(0, slots - 1), st.integers(1, max_rank))
    return slots, max_rank, draw(st.lists(take, max_size=40))


@given(histories())
def test_any_history_of_placements_fits(history: tuple[int, int, list[tuple[int, int]]]) -> None:
    slots, max_rank, takes = history
    ranges = RankRanges(slots, max_rank)
    chunk = ranges.capacity // slots
    held: dict[int, RankRange] = {}
    for slot, rank in takes:
        held.pop(slot, None)
        taken = held[slot] = ranges.take(slot, rank)
        assert taken.rank == rank
        assert taken.first % GRANULE == taken.last % GRANULE == 0
        assert 0 <= taken.first < taken.first + rank <= taken.last <= ranges.capacity
        assert taken.first // chunk == (taken.last - 1) // chunk, "it crosses no boundary"
        ordered = sorted(held.values(), key=lambda each: each.first)
        assert all(a.last <= b.first for a, b in pairwise(ordered))


def test_ranges_are_low_and_close() -> None:
    ranges = RankRanges(4, 64)
    assert [ranges.take(slot, 16).first for slot in range(4)] == [0, 16, 32, 48]
    assert ranges.take(1, 16).first == 16, "a slot's own old range counts as free"
    assert ranges.take(2, 60).first == 64
    assert ranges.take(3, 8).first == 32
