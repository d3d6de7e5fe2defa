"""Calls written as JSON: `{"name": .., "arguments": {..}}`, or a list of such objects.

A call begins once its name is known, is one of the request's functions, and its arguments have
begun. From then on its arguments are reported as they come, and what was read counts as *settled*:
it is in the report. What is not settled is given back as text should the JSON break.
"""

import json
import re
from collections.abc import Collection
from enum import Enum, auto

from router.tools.calls import CallLog
from router.tools.json_scan import JsonScanner, Place

MAX_HELD = 64 * 1024
"""Characters of arguments that are held until the name comes, or until a string has ended."""
MAX_WORD = 300
"""Characters of a key or a name as they are written."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_IN_STRING = frozenset({Place.STRING, Place.ESCAPE, Place.UNICODE})
_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = _ARGUMENTS | {"name", "id", "type"}


class Step(Enum):
    """What became of a character."""

    MORE = auto()
    DONE = auto()
    """It was the last one."""
    BROKEN = auto()
    """It does not fit; it was not taken."""


class CallsReader:
    """Reads one object or list of objects.

    `names` are the functions that may be called. `demand_arguments`: an object without them is no
    call; for formats in which nothing but the JSON itself says that it is one.
    """

    def __init__(
        self, log: CallLog, names: Collection[str], *, demand_arguments: bool = False
    ) -> None:
        self._log = log
        self._names = names
        self._demand_arguments = demand_arguments
        self._scanner = JsonScanner()
        self._level = 0
        """Depth inside a call's object; 0 until the first character is known."""
        self._begun_before = log.begun
        self._new_call()
        self.settled = False
        """Whether the last character is in the report."""

    def _new_call(self) -> None:
        self._keys: set[str] = set()
        self._key = ""
        self._word = ""
        self._name: str | None = None
        self._value = ""
        """Of the key, while it must be held."""
        self._in_value = False
        self._arguments: str | None = None
        """Arguments that came before the name."""
        self._begun = False

    def feed(self, character: str) -> Step:
        """Take the next character."""
        scanner = self._scanner
        place, depth = scanner.place, scanner.depth
        if not scanner.feed(character):
            return Step.BROKEN
        self.settled = self._begun
        if not self._level:
            return self._first(character)
        if depth < self._level:
            return self._between(character)
        own = depth == self._level
        if own and scanner.in_key and place in _IN_STRING:
            return self._in_key(character)
        starts = own and place is Place.VALUE and scanner.place is not place
        if starts and not self._begin_value(character):
            return Step.BROKEN
        return self._follow(character, place, scalar=own and place is Place.SCALAR)

    def skim(self, text: str, at: int) -> int:
        """See `Reader`."""
        reported = self._begun and self._in_value and self._key in _ARGUMENTS
        if not reported or self._scanner.place is not Place.STRING:
            return at
        end = end_of_plain(text, at)
        self._log.argue(text[at:end])
        return end

    # ------------------------------------------------------------ around the calls

    def _first(self, character: str) -> Step:
        if character == "{":
            self._level = 1
        elif character == "[":
            self._level = 2
        elif not character.isspace():
            return Step.BROKEN
        return Step.MORE

    def _between(self, character: str) -> Step:
        """In the list, outside all calls."""
        if self._scanner.place is Place.DONE:
            return Step.DONE if self._log.begun > self._begun_before else Step.BROKEN
        known = character in "{," or character.isspace()
        if character == "{":
            self._new_call()
        return Step.MORE if known else Step.BROKEN

    # ------------------------------------------------------------ inside a call

    def _in_key(self, character: str) -> Step:
        if self._scanner.place is not Place.COLON:
            self._word += character
            return Step.MORE if len(self._word) <= MAX_WORD else Step.BROKEN
        self._key, self._word = _text(self._word), ""
        kind = "arguments" if self._key in _ARGUMENTS else self._key
        if self._key not in _KEYS or kind in self._keys:
            return Step.BROKEN
        self._keys.add(kind)
        return Step.MORE

    def _begin_value(self, character: str) -> bool:
        self._in_value, self._value = True, ""
        if self._key == "name":
            return character == '"'
        if self._key in _ARGUMENTS:
            if character == "{" and self._name is not None:
                self._begin_call()
            return character in '{"n'
        return True

    def _follow(self, character: str, place: Place, *, scalar: bool) -> Step:
        """A character after a key's colon: the value's, or what separates it from the next key.

        A value that is a `scalar` ends before the first character that is not its own.
        """
        scanner = self._scanner
        scalar_ended = scalar and scanner.place is not Place.SCALAR
        if self._in_value and not scalar_ended and not self._take(character, place):
            return Step.BROKEN
        ended = scanner.depth == self._level and scanner.place is Place.AFTER_VALUE
        if self._in_value and (scalar_ended or ended) and not self._end_value():
            return Step.BROKEN
        return self._end_call() if scanner.depth < self._level else Step.MORE

    def _take(self, character: str, place: Place) -> bool:
        character = escaped(character, place)
        if self._begun and self._key in _ARGUMENTS:
            self._log.argue(character)
            return True
        self._value += character
        return len(self._value) <= (MAX_HELD if self._key in _ARGUMENTS else MAX_WORD)

    def _end_value(self) -> bool:
        """The key's value is whole; whether it is one that a call can have."""
        self._in_value = False
        value, self._value = self._value, ""
        if self._key == "name":
            self._name = _text(value[1:-1])
            if self._name not in self._names:
                return False
            if self._arguments is not None:
                self._begin_call()
        elif self._key in _ARGUMENTS and not self._begun:
            self._arguments = _object(value)
            if self._arguments is None:
                return False
            if self._name is not None:
                self._begin_call()
        return True

    def _begin_call(self) -> None:
        assert self._name is not None
        self._log.begin(self._name)
        self._begun = self.settled = True
        if self._arguments is not None:
            self._log.argue(self._arguments)

    def _end_call(self) -> Step:
        if not self._begun:
            if self._name is None or self._demand_arguments:
                return Step.BROKEN
            self._arguments = "{}"
            self._begin_call()
        self._log.end()
        self._begun = False
        return Step.DONE if self._scanner.place is Place.DONE else Step.MORE


def end_of_plain(text: str, at: int) -> int:
    """Inside a JSON string: up to where characters are what they seem."""
    plain = _PLAIN.match(text, at)
    return at if plain is None else plain.end()


def escaped(character: str, place: Place) -> str:
    """As valid JSON has it: models write line ends into strings as they are."""
    if place is Place.STRING and character < " ":
        return json.dumps(character)[1:-1]
    return character


def _text(written: str) -> str:
    """The text of a JSON string's inside, which was checked."""
    text: str = json.loads(f'"{written}"', strict=False)
    return text


def _object(value: str) -> str | None:
    """Arguments that are whole, as the text of an object: some models write that as a string."""
    if value == "null":
        return "{}"
    if not value.startswith('"'):
        return value
    text = _text(value[1:-1]).strip() or "{}"
    try:
        text.encode()  # half of a surrogate pair could not be sent
        return text if isinstance(json.loads(text), dict) else None
    except (ValueError, RecursionError):
        return None
