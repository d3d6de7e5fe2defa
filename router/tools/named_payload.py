"""Calls written as a name and its arguments: `name[ARGS]{..}`, as newer Mistral models do."""

import re
from collections.abc import Collection

from router.tools.calls import CallLog
from router.tools.json_scan import JsonScanner, Place
from router.tools.payload import MAX_WORD, CallsReader, Step, end_of_plain, escaped

_HEAD = re.compile(r"\s*(?P<name>[\w.:/-]+)\s*(\[CALL_ID\]\s*[\w-]+\s*)?(\[ARGS\]\s*)?", re.ASCII)
_IN_HEAD = re.compile(r"[\w.:/\[\]\s-]", re.ASCII)


class NamedReader:
    """Reads one call of that form, or a list of calls in JSON where it begins like one."""

    def __init__(self, log: CallLog, names: Collection[str]) -> None:
        self._log = log
        self._names = names
        self._head = ""
        self._calls: CallsReader | None = None
        self._arguments: JsonScanner | None = None
        self.settled = False

    def feed(self, character: str) -> Step:
        """Take the next character."""
        if self._calls is not None:
            step = self._calls.feed(character)
            self.settled = self._calls.settled
            return step
        if self._arguments is not None:
            return self._argue(self._arguments, character)
        if character in "{[" and not self._head.strip():
            self._calls = CallsReader(self._log, self._names)
            return self._calls.feed(character)
        if character == "{":
            return self._begin()
        self._head += character
        fits = len(self._head) <= MAX_WORD and _IN_HEAD.fullmatch(character)
        return Step.MORE if fits else Step.BROKEN

    def skim(self, text: str, at: int) -> int:
        """See `Reader`."""
        if self._calls is not None:
            return self._calls.skim(text, at)
        if self._arguments is None or self._arguments.place is not Place.STRING:
            return at
        end = end_of_plain(text, at)
        self._log.argue(text[at:end])
        return end

    def _begin(self) -> Step:
        head = _HEAD.fullmatch(self._head)
        if head is None or head["name"] not in self._names:
            return Step.BROKEN
        self._log.begin(head["name"])
        self.settled = True
        self._arguments = JsonScanner()
        return self._argue(self._arguments, "{")

    def _argue(self, scanner: JsonScanner, character: str) -> Step:
        place = scanner.place
        if not scanner.feed(character):
            return Step.BROKEN
        self._log.argue(escaped(character, place))
        if scanner.place is not Place.DONE:
            return Step.MORE
        self._log.end()
        return Step.DONE
