"""What a receiver that stages says of its slots: a word in a box, which senders read. Pure.

A receiver never calls a sender: it writes words into host memory that is registered with the write
library, and whoever wrote to it looks there. There is a box for each page and each KV head that a
piece may begin with, so a sender's boxes are its own for as long as its target pages are. A word is

    | tag, 40 bits | 0 asked, slot + 1 granted, or how it ended, 24 bits |

where the tag is that of the piece of which the receiver heard last for this page. A sender that
finds another one has been superseded: its pages have a new owner. Aligned words of 8 bytes are read
and written in one go by processors and network cards alike.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

STATE_BITS = 24
TAG_BITS = 40
WORD_BYTES = 8

_STATES = 1 << STATE_BITS
DONE = _STATES - 1
"""The piece is in its pages."""
FAILED = _STATES - 2
"""It never will be, and nothing of it will touch them."""
MAX_SLOTS = _STATES - 3
LOOK_BOXES = 256
"""Read at a time, at most."""

Words = npt.NDArray[np.uint64]


def word(tag: int, state: int) -> int:
    return tag << STATE_BITS | state


def tag_of(value: int) -> int:
    return value >> STATE_BITS


def slot_of(value: int) -> int | None:
    """The slot that was granted for the page; None if none is."""
    state = value & (_STATES - 1)
    return state - 1 if 1 <= state <= MAX_SLOTS else None


def state_of(value: int) -> int:
    return value & (_STATES - 1)


class Boxes:
    """The words of one pool of `num_pages`, whose pages hold `num_heads` KV heads."""

    def __init__(self, num_pages: int, num_heads: int) -> None:
        self.words: Words = np.zeros(num_pages * num_heads, dtype=np.uint64)
        self._num_heads = num_heads

    @property
    def address(self) -> int:
        return self.words.ctypes.data

    def put(self, boxes: Sequence[int], tag: int, states: Sequence[int]) -> None:
        self.words[list(boxes)] = [word(tag, state) for state in states]

    def end(self, boxes: Sequence[int], tag: int, state: int) -> None:
        """Say how a piece ended, where nobody was told of another one since."""
        for box in boxes:
            if tag_of(int(self.words[box])) == tag:
                self.words[box] = word(tag, state)

    def tag(self, box: int) -> int:
        return tag_of(int(self.words[box]))


def box_numbers(pages: Sequence[int], num_heads: int, head: int) -> tuple[int, ...]:
    """The boxes of `pages` for a piece whose first head is the page's head number `head`."""
    return tuple(page * num_heads + head for page in pages)
