"""A model's answer, split into content and calls while it comes.

             opening marker                  payload is whole
    CONTENT ───────────────▶ PAYLOAD ───────────────────────────▶ GAP
       ▲                        │                                  │
       ├──── does not fit ──────┘                                  │
       └──── neither white space, nor a closing marker, ◀──────────┘
             nor (bare formats) another payload

Every character is looked at once and in order, so it does not matter in which pieces the text
comes: the pieces' contents and arguments together are those of the whole. What turns out to be no
call is content, markup and all. White space beside a call belongs to its markup: chat templates
write it there.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from enum import Enum, auto
from typing import Protocol

from router.tools.calls import CallLog, MakeId, Parsed
from router.tools.payload import Step


class Reader(Protocol):
    """Takes a payload character by character."""

    settled: bool
    """Whether the last character is in the report."""

    def feed(self, character: str) -> Step:
        """Take the next character."""

    def skim(self, text: str, at: int) -> int:
        """Take those that are inside a string of a call's arguments, all at once; where it ended.

        Most of what is long is there.
        """


class _Mode(Enum):
    CONTENT = auto()
    PAYLOAD = auto()
    GAP = auto()
    OVER = auto()
    """There are as many calls as were wanted: nothing more counts."""


class CallParser(ABC):
    """Base of the formats.

    `names` are the functions that may be called; `max_calls` limits how many are reported.
    """

    opening: str = ""
    """The marker before a payload; empty: there is none."""
    closing: str = ""
    """The marker that may stand behind it."""
    special_markers: tuple[str, ...] = ()
    """Markers that some tokenizers have as special tokens, which are hidden from the client."""
    arguments_key: str = "arguments"
    """What the format's models call the arguments."""
    bare: bool = False
    """A payload may also begin without a marker, where the answer begins or the last one ended."""

    def __init__(
        self, names: Collection[str], make_id: MakeId, *, max_calls: int | None = None
    ) -> None:
        self._names = names
        self._log = CallLog(make_id)
        self._max_calls = max_calls
        self._mode = _Mode.GAP if self.bare else _Mode.CONTENT
        self._held = ""
        """Text of which it is not known yet what it is."""
        self._closable = False
        """The closing marker may come."""
        self._content: list[str] = []
        self._reader: Reader | None = None

    @property
    def called(self) -> bool:
        """Whether there are calls, and all of them are whole."""
        return self._log.begun == self._log.ended > 0

    @property
    def satisfied(self) -> bool:
        """Whether there are as many calls as were wanted."""
        return self._mode is _Mode.OVER

    @abstractmethod
    def _new_reader(self) -> Reader:
        """For the payload that begins here."""

    def feed(self, text: str) -> Parsed:
        """What is certain with this text."""
        at = 0
        while at < len(text):
            match self._mode:
                case _Mode.CONTENT:
                    at = self._read_content(text, at)
                case _Mode.PAYLOAD:
                    at = self._read_payload(text, at)
                case _Mode.GAP:
                    at = self._read_gap(text, at)
                case _Mode.OVER:
                    break
        return self._take()

    def finish(self) -> Parsed:
        """What is left at the end. A call that was cut off stays as far as it came."""
        beside_call = self._log.begun > 0 and (self._mode is _Mode.GAP or not self._held.strip())
        if not beside_call:
            self._content.append(self._held)
        self._held = ""
        return self._take()

    def _take(self) -> Parsed:
        parsed = Parsed("".join(self._content), self._log.take())
        self._content.clear()
        return parsed

    # ------------------------------------------------------------ the modes

    def _read_content(self, text: str, at: int) -> int:
        """Up to the opening marker; white space before it waits with it."""
        known = len(self._held)
        whole, self._held = self._held + text[at:], ""
        found = whole.find(self.opening) if self.opening else -1
        end = found if found >= 0 else len(whole) - self._marker_begun(whole)
        content = whole[:end].rstrip()
        self._content.append(content)
        if found < 0:
            self._held = whole[len(content) :]
            return len(text)
        end += len(self.opening)
        self._begin_payload(whole[len(content) : end])
        return at + end - known

    def _read_payload(self, text: str, at: int) -> int:
        assert self._reader is not None
        i = at
        while (i := self._reader.skim(text, i)) < len(text):
            step = self._reader.feed(text[i])
            if step is Step.BROKEN:
                self._content.append(self._held)
                self._held, self._mode = "", _Mode.CONTENT
                return i
            self._held = "" if self._reader.settled else self._held + text[i]
            i += 1
            if self._log.ended == self._max_calls:
                self._held, self._mode = "", _Mode.OVER
                return i
            if step is Step.DONE:
                self._held, self._mode = "", _Mode.GAP
                self._closable = bool(self.closing)
                return i
        return len(text)

    def _read_gap(self, text: str, at: int) -> int:
        for i in range(at, len(text)):
            held = self._held + text[i]
            word = held.lstrip()
            if self._closable and self.closing.startswith(word):
                self._held = held
                if word == self.closing:
                    self._held, self._closable = "", False
            elif self.bare and word in ("{", "["):
                self._begin_payload(self._held)
                return i
            elif word:
                self._mode = _Mode.CONTENT
                return i
            else:
                self._held = held
        return len(text)

    def _begin_payload(self, held: str) -> None:
        self._held, self._mode = held, _Mode.PAYLOAD
        self._reader = self._new_reader()

    def _marker_begun(self, text: str) -> int:
        """Length of the longest end of `text` that begins the opening marker."""
        for length in range(min(len(self.opening) - 1, len(text)), 0, -1):
            if text.endswith(self.opening[:length]):
                return length
        return 0
