"""What the nodes of one role were given of late, in tokens of work. Pure.

It tells which nodes have had more than their share, also when all have finished and none has any
load. What is older than the window fades: all counts are halved when they have filled it.
"""

from router.policies import Candidate

WINDOW_TOKENS = 32_768
"""Tokens for each node, on average, that are remembered in full."""


class RecentWork:
    """Keeps `Candidate.recent` of all nodes of a role."""

    def __init__(self) -> None:
        self._nodes: set[Candidate] = set()
        self._total = 0.0

    def join(self, node: Candidate) -> None:
        """A node that is new begins with as much as the others have: it has missed nothing."""
        node.recent = self._total / len(self._nodes) if self._nodes else 0.0
        self._nodes.add(node)
        self._total += node.recent

    def give(self, node: Candidate, tokens: int) -> None:
        """A node was given work."""
        node.recent += tokens
        self._total += tokens
        if self._total > WINDOW_TOKENS * len(self._nodes):
            for other in self._nodes:
                other.recent /= 2
            self._total /= 2

    def forget(self, node: Candidate) -> None:
        """The node is gone."""
        self._nodes.discard(node)
        self._total -= node.recent
