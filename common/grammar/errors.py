"""What can be wrong with a grammar."""


class GrammarError(Exception):
    """It cannot be compiled, its limits are used up, or tokens do not obey it; the message is for
    the person who wrote it."""
