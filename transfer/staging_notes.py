"""What a sender tells a receiver that stages, as notifications. Pure.

Anybody who reaches the data plane may send such bytes: what they may say is checked by `Landing`.
"""

import msgspec


class Note(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    tag: int
    """The piece's, one of `boxes.TAG_BITS` bits."""


class Ask(Note, frozen=True, gc=False):
    """Slots are wanted for a piece; the answer is in the pages' boxes. May be repeated."""

    pages: tuple[int, ...]
    """Where the piece is to go in the end."""
    first_head: int
    num_heads: int
    """KV heads that the piece brings of each page, in the whole model's numbering."""


class Brought(Note, frozen=True, gc=False):
    """Comes with the piece itself: its bytes are in the slots."""

    slots: tuple[int, ...]
    notification: bytes
    """Of the whole write, once all its pieces are in their pages; empty with the others."""


class Withdraw(Note, frozen=True, gc=False):
    """The piece will not be sent; it never was."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ask | Brought | Withdraw).decode


def encode(note: Note) -> bytes:
    return _encode(note)


def decode(payload: bytes) -> Ask | Brought | Withdraw | None:
    """None if these bytes are no note."""
    try:
        note: Ask | Brought | Withdraw = _decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    return note
