"""Padded sizes, and a step's numbers on their way."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.engine.cuda.sizes import default_sizes, padded_size, usable_sizes
from common.engine.cuda.staging import Staging
from tests.late_stream import LateStream


def test_sizes_are_powers_of_two_and_the_largest() -> None:
    assert default_sizes(1) == (1,)
    assert default_sizes(8) == (1, 2, 4, 8)
    assert default_sizes(48) == (1, 2, 4, 8, 16, 32, 48)


def test_asked_sizes_are_put_in_order_and_cut_off() -> None:
    assert usable_sizes((64, 3, 3, 200), 48) == (3, 48)
    assert usable_sizes((), 48) == ()


@given(st.integers(1, 300), st.integers(1, 400))
def test_a_batch_is_padded_to_less_than_twice_its_size(largest: int, count: int) -> None:
    size = padded_size(default_sizes(largest), count)
    if count > largest:
        assert size is None
    else:
        assert size is not None
        assert count <= size < 2 * count or size == largest < 2 * count


def make(size: int = 16) -> tuple[LateStream, Staging]:
    stream = LateStream()
    return stream, Staging(stream, torch.device("cpu"), size, max_answers=4)


def test_numbers_have_the_same_places_in_each_step() -> None:
    stream, staging = make()
    for values in ([1, 2], [3, 4, 5], []):
        parcel = staging.parcel()
        parcel.put(values, room=4)
        behind = parcel.put([9], room=4)
        stream.submit(parcel.send).wait()
        assert staging.numbers[: len(values)].tolist() == values
        assert staging.numbers[4] == 9
        assert behind.data_ptr() == staging.numbers[4:].data_ptr()


def test_more_than_there_is_room_for_is_a_bug_of_the_runner() -> None:
    _, staging = make()
    with pytest.raises(AssertionError, match="room for 4"):
        staging.parcel().put([1, 2, 3, 4, 5], room=4)


def test_what_does_not_fit_is_sent_apart() -> None:
    stream, staging = make(size=4)
    parcel = staging.parcel()
    inside, beside = parcel.put([1, 2, 3]), parcel.put([4, 5])
    stream.submit(parcel.send).wait()
    assert (inside.tolist(), beside.tolist()) == ([1, 2, 3], [4, 5])
    assert parcel.put([6]).data_ptr() == staging.numbers[3:].data_ptr(), "there is room for one"


def test_a_step_under_way_keeps_its_numbers_while_the_next_is_filled() -> None:
    stream, staging = make()
    first, second = staging.parcel(), staging.parcel()
    there = first.put([1, 2])
    event = stream.submit(first.send)
    second.put([7, 8])
    event.wait()
    assert there.tolist() == [1, 2]
    stream.submit(second.send).wait()
    assert there.tolist() == [7, 8]


def test_tokens_are_fetched() -> None:
    stream, staging = make()
    parcel = staging.parcel()
    tokens = parcel.put([5, 6, 7])
    stream.submit(parcel.send)
    event = stream.submit(lambda: parcel.fetch(tokens))
    event.wait()
    assert parcel.fetched(3) == [5, 6, 7]
