"""Matches PEFT's rank and alpha patterns, which are regular expressions from a stranger's file.

A few characters of one can keep `re` busy for years, and it holds the interpreter's lock meanwhile:
the engine would stand still. So all but the plainest are matched in a process that can be ended.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence

MATCH_S = 5.0
"""Time for all modules; a sensible set of patterns takes milliseconds."""
_PLAIN = re.compile(r"\^?(?:\w|\.|\\\.)+")
"""Names, dots, escaped dots: nothing that repeats, and no choice."""
_MATCHER = """
import json, re, sys
keys, names = json.load(sys.stdin)
for key in keys:
    try:
        re.compile(key)
    except (re.error, RecursionError, OverflowError) as error:
        print(json.dumps([key, str(error)]))
        sys.exit()
def first(name):
    for key in keys:
        if re.match(rf"(.*\\.)?({key})$", name):
            return key
print(json.dumps([None, [first(name) for name in names]]))
"""


class PatternError(Exception):
    """A pattern is no regular expression, or takes too long to match."""


def first_matches(keys: Sequence[str], names: Sequence[str]) -> list[str | None]:
    """For each name the first key that matches it: PEFT's rule, a whole name or the end of one
    from a dot on. Raises PatternError."""
    if not keys:
        return [None] * len(names)
    if all(_PLAIN.fullmatch(key) for key in keys):
        patterns = [(key, re.compile(rf"(.*\.)?({key})$")) for key in keys]
        return [next((key for key, p in patterns if p.match(name)), None) for name in names]
    return _match_outside(keys, names)


def _match_outside(keys: Sequence[str], names: Sequence[str]) -> list[str | None]:
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCHER],
            input=json.dumps([keys, names]),
            capture_output=True,
            text=True,
            timeout=MATCH_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise PatternError(f"its patterns take more than {MATCH_S:g} s to match") from None
    except (OSError, subprocess.CalledProcessError) as error:
        raise PatternError(f"its patterns could not be matched: {error}") from error
    bad, found = json.loads(ended.stdout)
    if bad is not None:
        raise PatternError(f"{bad[:80]!r} is no regular expression: {found}")
    matches: list[str | None] = found
    return matches
