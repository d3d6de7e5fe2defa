"""Notifications that come in pieces: told once, when all are here; nothing else is believed."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.plan import Notified, PieceLanded, PiecesDropped
from transfer import pieces
from transfer.pieces import MARK, MAX_PIECES, PieceGatherer, wrapped


def told(gatherer: PieceGatherer, payload: bytes) -> list[Notified | PieceLanded | PiecesDropped]:
    return gatherer.take(payload)


def held(gatherer: PieceGatherer) -> int:
    return sum(len(incomplete) for incomplete in gatherer._sources.values())


def test_one_piece_is_the_notification_itself() -> None:
    assert wrapped(b"n", 0, 1, "s") == b"n"
    assert told(PieceGatherer(), b"n") == [Notified(b"n")]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.integers(0, 2**32),
)
def test_each_is_told_once_when_its_last_piece_is_here(totals: list[int], seed: int) -> None:
    """In any order, mixed, and with pieces that come again while others are missing."""
    chance = random.Random(seed)
    arriving = [
        (number, index, total) for number, total in enumerate(totals) for index in range(total)
    ]
    chance.shuffle(arriving)
    gatherer = PieceGatherer()
    here: dict[int, set[int]] = {number: set() for number in range(len(totals))}
    for number, index, total in arriving:
        notification = f"room {number}".encode()
        payload = wrapped(notification, index, total, f"source {number % 2}")
        here[number].add(index)
        complete = len(here[number]) == total
        expected = Notified(notification) if complete else PieceLanded(notification)
        assert told(gatherer, payload) == [expected]
        if not complete and chance.random() < 0.5:
            assert told(gatherer, payload) == [PiecesDropped(1)]
    assert held(gatherer) == 0
    assert not gatherer._sources


def test_pieces_of_different_writes_make_no_notification() -> None:
    gatherer = PieceGatherer()
    for payload in (
        wrapped(b"a", 0, 2, "s"),
        wrapped(b"b", 1, 2, "s"),  # another notification
        wrapped(b"a", 1, 3, "s"),  # another number of pieces
        wrapped(b"a", 1, 2, "t"),  # another source
    ):
        assert [type(event) for event in told(gatherer, payload)] == [PieceLanded]
    assert told(gatherer, wrapped(b"a", 1, 2, "s")) == [Notified(b"a")]


def raw(*fields: object) -> bytes:
    return MARK + msgspec.msgpack.encode(list(fields))


@pytest.mark.parametrize(
    "garbage",
    [
        MARK,
        MARK + b"\xff" * 9,
        MARK + b"\x91" * 100_000,
        raw("s", 0, 2),
        raw(7, 0, 2, b"n"),
        raw("s", -1, 2, b"n"),
        raw("s", 2, 2, b"n"),
        raw("s", 0, 1, b"n"),
        raw("s", 0, 0, b"n"),
        raw("s", 0, -3, b"n"),
        raw("s", 0, MAX_PIECES + 1, b"n"),
        raw("s", 0, 1 << 62, b"n"),
        raw("s", 0.5, 2, b"n"),
        raw("s", 0, 2, "text"),
        wrapped(b"n", 0, 2, "s")[:-1],
    ],
    ids=lambda payload: payload[:12].hex(),
)
def test_what_no_node_sends_goes_up_as_it_is(garbage: bytes) -> None:
    """Whoever reads notifications finds that it is none, and counts it."""
    gatherer = PieceGatherer()
    assert told(gatherer, garbage) == [Notified(garbage)]
    assert not gatherer._sources


def test_of_one_source_the_oldest_is_given_up_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_BYTES_A_SOURCE", 10 * (pieces.ENTRY_BYTES + 4))
    gatherer = PieceGatherer()
    for number in range(10):
        assert told(gatherer, wrapped(b"%04d" % number, 0, 3, "s")) == [
            PieceLanded(b"%04d" % number)
        ]
    told(gatherer, wrapped(b"0000", 1, 3, "s"))
    told(gatherer, wrapped(b"else", 0, 2, "another"))
    assert told(gatherer, wrapped(b"0010", 0, 3, "s")) == [PieceLanded(b"0010"), PiecesDropped(2)]
    assert told(gatherer, wrapped(b"else", 1, 2, "another")) == [Notified(b"else")]
    assert held(gatherer) == 10


def test_many_sources_cannot_hold_more_than_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_SOURCES", 3)
    gatherer = PieceGatherer()
    for name in ("a", "b", "c", "a"):
        told(gatherer, wrapped(name.encode(), 0, 9, name))
    assert told(gatherer, wrapped(b"d", 0, 9, "d")) == [PieceLanded(b"d"), PiecesDropped(1)]
    assert list(gatherer._sources) == ["c", "a", "d"]


def test_a_source_that_is_gone_is_forgotten() -> None:
    gatherer = PieceGatherer()
    told(gatherer, wrapped(b"n", 0, 3, "s"))
    told(gatherer, wrapped(b"n", 1, 3, "s"))
    told(gatherer, wrapped(b"n", 0, 2, "t"))
    assert gatherer.forget("s") == [PiecesDropped(2)]
    assert gatherer.forget("s") == []
    assert told(gatherer, wrapped(b"n", 2, 3, "s")) == [PieceLanded(b"n")]
    assert told(gatherer, wrapped(b"n", 1, 2, "t")) == [Notified(b"n")]
