"""One JSON value, checked character by character while a model writes it."""

import re
from enum import Enum, auto

MAX_DEPTH = 128
"""Deeper nesting counts as broken: whoever reads the arguments has a limit too."""
MAX_SCALAR = 400
"""Characters of a number."""

_WHITESPACE = frozenset(" \t\r\n")
_CLOSES = {"{": "}", "[": "]"}
_ESCAPES = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_BEGINS = frozenset("-0123456789")
_NUMBER_GOES_ON = frozenset("0123456789.eE+-")
_LITERALS = ("true", "false", "null")


class Place(Enum):
    """What may come next."""

    VALUE = auto()
    FIRST_ITEM = auto()
    """A value, or the end of an empty list."""
    FIRST_KEY = auto()
    """A key, or the end of an empty object."""
    KEY = auto()
    COLON = auto()
    STRING = auto()
    ESCAPE = auto()
    UNICODE = auto()
    SCALAR = auto()
    """In a number or a literal, which ends only with what follows it."""
    AFTER_VALUE = auto()
    """A comma or the end of what the value is in."""
    DONE = auto()


class JsonScanner:
    """Feed it until it is done or a character does not fit.

    Control characters in strings are let through: models write them, and whoever passes the text on
    can escape them. For the rest it takes what `json.loads` takes, but no NaN and no infinity.
    """

    def __init__(self) -> None:
        self.place = Place.VALUE
        self._stack: list[str] = []
        self._in_key = False
        self._hex_left = 0
        self._scalar = ""

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._stack)

    @property
    def in_key(self) -> bool:
        """Whether the string that is open, or was last, is a key."""
        return self._in_key

    def feed(self, character: str) -> bool:
        """Whether it fits. After one that does not, the scanner is of no use."""
        match self.place:
            case Place.STRING:
                return self._in_string(character)
            case Place.ESCAPE:
                return self._escaped(character)
            case Place.UNICODE:
                self._hex_left -= 1
                if not self._hex_left:
                    self.place = Place.STRING
                return character in _HEX
            case Place.SCALAR:
                return self._in_scalar(character)
            case _ if character in _WHITESPACE:
                return True
            case Place.VALUE:
                return self._begin_value(character)
            case Place.FIRST_ITEM:
                return self._close(character) or self._begin_value(character)
            case Place.FIRST_KEY:
                return self._close(character) or self._begin_key(character)
            case Place.KEY:
                return self._begin_key(character)
            case Place.COLON:
                self.place = Place.VALUE
                return character == ":"
            case Place.AFTER_VALUE:
                return self._close(character) or self._separate(character)
            case Place.DONE:
                return False

    def _in_string(self, character: str) -> bool:
        if character == "\\":
            self.place = Place.ESCAPE
        elif character == '"':
            if self._in_key:
                self.place = Place.COLON
            else:
                self._value_ended()
        return True

    def _escaped(self, character: str) -> bool:
        self.place = Place.STRING
        if character == "u":
            self.place, self._hex_left = Place.UNICODE, 4
        return character in _ESCAPES

    def _in_scalar(self, character: str) -> bool:
        if self._scalar[0] in _NUMBER_BEGINS:
            if character in _NUMBER_GOES_ON:
                self._scalar += character
                return len(self._scalar) <= MAX_SCALAR
            if _NUMBER.fullmatch(self._scalar) is None:
                return False
        elif self._scalar not in _LITERALS:
            self._scalar += character
            return any(literal.startswith(self._scalar) for literal in _LITERALS)
        self._value_ended()
        return self.feed(character)

    def _begin_value(self, character: str) -> bool:
        if character in _CLOSES:
            self._stack.append(character)
            self.place = Place.FIRST_KEY if character == "{" else Place.FIRST_ITEM
            return len(self._stack) <= MAX_DEPTH
        if character == '"':
            self.place, self._in_key = Place.STRING, False
            return True
        self.place, self._scalar = Place.SCALAR, character
        return character in _NUMBER_BEGINS or character in "tfn"

    def _begin_key(self, character: str) -> bool:
        self.place, self._in_key = Place.STRING, True
        return character == '"'

    def _separate(self, character: str) -> bool:
        self.place = Place.KEY if self._stack[-1] == "{" else Place.VALUE
        return character == ","

    def _close(self, character: str) -> bool:
        if not self._stack or character != _CLOSES[self._stack[-1]]:
            return False
        self._stack.pop()
        self._value_ended()
        return True

    def _value_ended(self) -> None:
        self.place = Place.AFTER_VALUE if self._stack else Place.DONE
