"""What a receiver makes of what senders say, true and wrong; its slots, and its boxes' words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.plan import Notified
from tests.unit.transfer.slow_stage import SlowStage
from transfer.boxes import (
    DONE,
    FAILED,
    MAX_SLOTS,
    TAG_BITS,
    Boxes,
    box_numbers,
    slot_of,
    state_of,
    tag_of,
    word,
)
from transfer.head_ranges import HeadRange
from transfer.landing import GRANT_S, MAX_WITHDRAWN, Landing
from transfer.slots import Direction, Slots
from transfer.staging_notes import Ask, Brought, Note, Withdraw, encode

NUM_PAGES, NUM_HEADS = 32, 4
FIRST_HEAD = 8
"""Of the model's, the first that this rank has."""


class Receiver:
    def __init__(self, num_slots: int = 16) -> None:
        self.now = 0.0
        self.pool = np.zeros((NUM_PAGES, 2, 2, NUM_HEADS, 8), np.uint8)
        self.stage = SlowStage(self.pool, num_slots)
        self.slots = Slots(num_slots)
        self.boxes = Boxes(NUM_PAGES, NUM_HEADS)
        heads = HeadRange(FIRST_HEAD, NUM_HEADS)
        self.landing = Landing(
            self.stage, self.slots, self.boxes, NUM_PAGES, heads, lambda: self.now
        )

    def tell(self, note: Note) -> None:
        self.landing.take(encode(note))

    def ask(self, tag: int, *pages: int, first: int = FIRST_HEAD, count: int = NUM_HEADS) -> None:
        self.tell(Ask(tag, pages, first, count))

    def words(self, *pages: int, head: int = 0) -> list[tuple[int, int]]:
        """(tag, state) in the boxes."""
        found = (int(self.boxes.words[b]) for b in box_numbers(pages, NUM_HEADS, head))
        return [(tag_of(value), state_of(value)) for value in found]

    def granted(self, *pages: int, head: int = 0) -> tuple[int, ...]:
        return tuple(state - 1 for _, state in self.words(*pages, head=head))

    def bring(self, tag: int, slots: tuple[int, ...], value: int, payload: bytes = b"n") -> None:
        """What the library does, and then the sender's word."""
        self.stage.ring[list(slots)] = value
        self.tell(Brought(tag, slots, payload))

    def run(self, rounds: int = 20) -> list[bytes]:
        return [event.payload for _ in range(rounds) for event in self.landing.progress()]


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


def test_asked_granted_brought_copied_notified(receiver: Receiver) -> None:
    receiver.ask(7, 3, 5)
    slots = receiver.granted(3, 5)
    assert [tag for tag, _ in receiver.words(3, 5)] == [7, 7]
    assert receiver.slots.num_free == 14
    receiver.bring(7, slots, 42)
    assert receiver.landing.progress() == [], "two pages take two looks"
    assert receiver.words(3) == [(7, slots[0] + 1)]
    assert receiver.landing.progress() == [Notified(b"n")]
    assert receiver.words(3, 5) == [(7, DONE), (7, DONE)]
    assert (receiver.pool[[3, 5]] == 42).all()
    assert receiver.pool.sum() == receiver.pool[[3, 5]].sum()
    assert receiver.slots.num_free == 16
    assert receiver.landing.num_open == 0


def test_of_a_piece_only_its_heads_are_copied(receiver: Receiver) -> None:
    """Two ranks of the sender write to one page, at the same time."""
    receiver.ask(7, 3, first=6, count=4)  # of them this rank has 8 and 9
    receiver.ask(8, 3, first=10, count=2)
    low, high = receiver.granted(3), receiver.granted(3, head=2)
    assert receiver.words(3, head=1) == [(0, 0)]
    receiver.bring(8, high, 8)
    receiver.bring(7, low, 7)
    assert receiver.run() == [b"n", b"n"]
    assert (receiver.pool[3, :, :, :2] == 7).all()
    assert (receiver.pool[3, :, :, 2:] == 8).all()


def test_a_piece_without_a_notification_lands_silently(receiver: Receiver) -> None:
    receiver.ask(7, 3)
    receiver.bring(7, receiver.granted(3), 1, b"")
    assert receiver.run() == []
    assert receiver.words(3) == [(7, DONE)]


def test_whoever_asked_first_is_served_first() -> None:
    receiver = Receiver(num_slots=8)
    receiver.ask(1, *range(5))
    receiver.ask(2, *range(5, 9))
    receiver.ask(3, 9)
    receiver.run()
    assert receiver.words(5) == [(2, 0)]
    assert receiver.words(9) == [(3, 0)], "there would be a slot, but not yet for this one"
    receiver.bring(1, receiver.granted(*range(5)), 1)
    receiver.run()
    assert state_of(int(receiver.boxes.words[5 * NUM_HEADS])) > 0
    assert state_of(int(receiver.boxes.words[9 * NUM_HEADS])) > 0


def test_asking_again_changes_nothing(receiver: Receiver) -> None:
    receiver.ask(7, 3)
    slots = receiver.granted(3)
    receiver.ask(7, 3)
    assert receiver.granted(3) == slots
    assert receiver.slots.num_free == 15
    receiver.bring(7, slots, 1)
    receiver.run()
    receiver.ask(7, 3)
    assert receiver.words(3) == [(7, DONE)]
    assert receiver.slots.num_free == 16


def test_a_page_that_is_asked_for_anew_frees_the_slots_of_before(receiver: Receiver) -> None:
    receiver.ask(7, 3, 4)
    old = receiver.granted(3, 4)
    receiver.ask(8, 4, 5)
    assert receiver.slots.num_free == 14
    assert receiver.words(3) == [(7, FAILED)]
    assert [tag for tag, _ in receiver.words(4, 5)] == [8, 8]
    receiver.bring(7, old, 66)
    assert receiver.run() == []
    assert (receiver.pool == 0).all()


def test_a_stray_write_fails_whoever_has_its_slots_now(receiver: Receiver) -> None:
    receiver.ask(7, 3)
    old = receiver.granted(3)
    receiver.ask(8, 3)
    assert receiver.granted(3) == old, "the slot that was free last is given first"
    receiver.bring(7, old, 66)
    receiver.bring(8, old, 1)
    assert receiver.run() == []
    assert receiver.words(3) == [(8, FAILED)]
    assert receiver.slots.num_free == 16
    assert (receiver.pool == 0).all()


def test_a_piece_brought_into_other_slots_than_its_own_fails(receiver: Receiver) -> None:
    receiver.ask(7, 3)
    (slot,) = receiver.granted(3)
    receiver.bring(7, ((slot + 1) % 16,), 1)
    assert receiver.run() == []
    assert receiver.words(3) == [(7, FAILED)]


def test_withdrawn_slots_are_free_also_when_the_question_comes_later(receiver: Receiver) -> None:
    receiver.ask(7, 3)
    receiver.tell(Withdraw(7))
    assert receiver.slots.num_free == 16
    receiver.tell(Withdraw(8))
    receiver.ask(8, 4)
    assert receiver.slots.num_free == 16
    assert receiver.words(4) == [(0, 0)]
    for tag in range(100, 100 + 2 * MAX_WITHDRAWN):
        receiver.tell(Withdraw(tag))
    assert len(receiver.landing._withdrawn) == MAX_WITHDRAWN


def test_unused_slots_are_taken_back_after_a_while(receiver: Receiver) -> None:
    receiver.ask(7, 3)
    receiver.now = GRANT_S / 2
    receiver.ask(8, 4)
    receiver.now = GRANT_S + 1
    receiver.run(1)
    assert receiver.words(3) == [(7, FAILED)]
    assert receiver.words(4)[0][1] not in (FAILED, DONE)
    assert receiver.slots.num_free == 15


@pytest.mark.parametrize(
    "note",
    [
        Ask(0, (3,), FIRST_HEAD, NUM_HEADS),
        Ask(1 << TAG_BITS, (3,), FIRST_HEAD, NUM_HEADS),
        Ask(-1, (3,), FIRST_HEAD, NUM_HEADS),
        Ask(7, (), FIRST_HEAD, NUM_HEADS),
        Ask(7, (3, 3), FIRST_HEAD, NUM_HEADS),
        Ask(7, (NUM_PAGES,), FIRST_HEAD, NUM_HEADS),
        Ask(7, (-1,), FIRST_HEAD, NUM_HEADS),
        Ask(7, tuple(range(13)), FIRST_HEAD, NUM_HEADS),
        Ask(7, (3,), 0, 8),
        Ask(7, (3,), FIRST_HEAD, 0),
        Ask(7, (3,), FIRST_HEAD, -5),
        Brought(7, (3,), b"n"),
        Brought(7, (-1, 99), b"n"),
        Withdraw(7),
    ],
    ids=repr,
)
def test_nonsense_is_dropped(receiver: Receiver, note: Note) -> None:
    receiver.tell(note)
    assert receiver.run() == []
    assert (receiver.boxes.words == 0).all()
    assert receiver.slots.num_free == 16


@given(st.binary(max_size=60))
def test_bytes_that_are_no_note_are_dropped(payload: bytes) -> None:
    receiver = Receiver()
    receiver.landing.take(payload)
    receiver.run(1)


# ---------------------------------------------------------------- words and slots


@given(st.integers(1, (1 << TAG_BITS) - 1), st.integers(0, MAX_SLOTS - 1))
def test_words_hold_a_tag_and_a_slot(tag: int, slot: int) -> None:
    value = word(tag, slot + 1)
    assert value < 1 << 64
    assert (tag_of(value), slot_of(value)) == (tag, slot)
    for state in (0, DONE, FAILED):
        assert (state_of(word(tag, state)), slot_of(word(tag, state))) == (state, None)


def test_boxes_of_pages_and_heads_are_all_different() -> None:
    numbers = [box for head in range(3) for box in box_numbers(range(5), 3, head)]
    assert sorted(numbers) == list(range(15))


@given(st.integers(8, 64), st.lists(st.tuples(st.sampled_from(Direction), st.integers(1, 9))))
def test_slots_are_given_once_and_neither_way_gets_all(
    count: int, takes: list[tuple[Direction, int]]
) -> None:
    slots = Slots(count)
    held: list[tuple[Direction, tuple[int, ...]]] = []
    for direction, wanted in takes:
        got = slots.take(direction, wanted)
        if got is None:
            mine = sum(len(g) for d, g in held if d is direction)
            assert wanted > slots.num_free or mine + wanted > count - count // 4
            if held:
                slots.give(*held.pop(0))
        else:
            assert len(got) == wanted
            held.append((direction, got))
        all_held = [slot for _, group in held for slot in group]
        assert len(set(all_held)) == len(all_held) == count - slots.num_free
        assert set(all_held) <= set(range(count))
