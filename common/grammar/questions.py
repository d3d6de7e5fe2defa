"""What a router and its grammar checker say to each other: JSON, one object a line."""

import msgspec

from common.messages import Grammar


class Question(msgspec.Struct, frozen=True):
    """Can nodes compile this?"""

    number: int
    grammar: Grammar


class Answer(msgspec.Struct, frozen=True):
    """They can, or they cannot, and why."""

    number: int
    grammar: Grammar | None
    """As nodes take it; None if it is refused."""
    problem: str = ""
