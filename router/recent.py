"""What the nodes of one role were given of late, in tokens of work. Pure.

It tells which nodes have had more than their share, also when all have finished and none has any
load. What is older than the window fades: all counts are halved when they have filled it.
"""

from common.messages import Incarnation

WINDOW_TOKENS = 32_768
"""Tokens for each node, on average, that are remembered in full."""


class RecentWork:
    """Counts by node."""

    def __init__(self) -> None:
        self._tokens: dict[Incarnation, float] = {}
        self._total = 0.0

    def of(self, node: Incarnation) -> float:
        """A node that is new begins with as much as the others have: it has missed nothing."""
        tokens = self._tokens.get(node)
        if tokens is None:
            tokens = self._total / len(self._tokens) if self._tokens else 0.0
            self._tokens[node] = tokens
            self._total += tokens
        return tokens

    def give(self, node: Incarnation, tokens: int) -> None:
        """A node was given work."""
        self._tokens[node] = self.of(node) + tokens
        self._total += tokens
        if self._total > WINDOW_TOKENS * len(self._tokens):
            for name in self._tokens:
                self._tokens[name] /= 2
            self._total /= 2

    def forget(self, node: Incarnation) -> None:
        """The node is gone."""
        self._total -= self._tokens.pop(node, 0.0)
