"""Tokens to text while they come: never a broken character, never a part of a stop string.

    token ids ──▶ Detokenizer ──▶ StopMatcher ──▶ text that will not change any more

A character may be spread over several tokens. In byte-level vocabularies that is all, and tokens
are looked up (`byte_tokens`). In others how a token reads may depend on the one before, so a small
window of recent tokens is decoded together: the text of its first part is out already, that of the
rest is new. (The idea is text-generation-inference's.)
"""

from collections.abc import Sequence
from typing import Protocol

from router.byte_tokens import ByteDetokenizer, ByteTable

BROKEN = "\ufffd"
MAX_HELD = 3
"""Bytes of an unfinished character; more broken characters than that will stay broken."""
MAX_WINDOW = 64
"""Tokens decoded together before a cut is looked for."""


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def byte_table(self) -> ByteTable | None:
        """None: not a byte-level vocabulary."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


class Detokenizer(Protocol):
    """Text of a growing list of tokens; the parts together are the text of the whole."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""

    def flush(self) -> str:
        """What is left at the end, broken or not."""


def make_detokenizer(codec: Decoder, *, skip_special_tokens: bool = True) -> Detokenizer:
    """The cheapest one that is right for the vocabulary."""
    if codec.byte_table is not None:
        return ByteDetokenizer(codec.byte_table, skip_special_tokens=skip_special_tokens)
    return WindowDetokenizer(codec, skip_special_tokens=skip_special_tokens)


class WindowDetokenizer:
    """Text of a growing list of tokens; the parts together are the text of the whole."""

    def __init__(self, codec: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._codec = codec
        self._skipped = codec.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_old = 0
        """Tokens at the window's begin whose text is out and whole."""
        self._emitted = 0
        """Characters of the window's text that are out."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._codec.decode(self._window)
        stable = len(text)
        while stable and stable > len(text) - MAX_HELD and text[stable - 1] == BROKEN:
            stable -= 1
        new = text[self._emitted : stable]
        self._emitted = max(self._emitted, stable)
        if stable == len(text) and new:
            self._advance(self._num_old)
        elif len(self._window) > MAX_WINDOW:
            self._cut(text)
        return new

    def flush(self) -> str:
        """What is left at the end, broken or not."""
        text = self._codec.decode(self._window)
        new = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return new

    def _advance(self, start: int) -> None:
        """Forget the old part; what was new is the old part now."""
        del self._window[:start]
        self._num_old = len(self._window)
        self._emitted = len(self._codec.decode(self._window))

    def _cut(self, text: str) -> None:
        """In a long run of broken characters, forget tokens where the text can be cut exactly."""
        for keep in range(8, 16):
            left = self._codec.decode(self._window[:-keep])
            right = self._codec.decode(self._window[-keep:])
            if left + right == text and len(left) <= self._emitted:
                del self._window[:-keep]
                self._num_old = 0
                self._emitted -= len(left)
                return


class StopMatcher:
    """Finds the first stop string; holds back what may yet become one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing follows it."""

    def feed(self, text: str) -> str:
        """The text that is certain now."""
        if not self._stops:
            return text
        held = self._held + text
        found = min(
            ((at, stop) for stop in self._stops if (at := held.find(stop)) >= 0),
            default=None,
            key=lambda hit: (hit[0] + len(hit[1]), hit[0]),
        )
        if found is not None:
            at, self.matched = found
            self._held = ""
            return held[: at + len(self.matched)] if self._include else held[:at]
        keep = self._longest_begin(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def pass_through(self, text: str) -> str:
        """Text in which stop strings do not count."""
        out, self._held = self._held + text, ""
        return out

    def flush(self) -> str:
        """What was held back; no stop string came of it."""
        out, self._held = self._held, ""
        return out

    def _longest_begin(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
