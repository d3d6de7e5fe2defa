"""What the nodes of one role were given of late, in tokens of work. Pure.

It tells which nodes have had more than their share, also when all have finished and none has any
load. What is older than the window fades: all counts are halved when they have filled it. The
window follows the pace of the nodes: how much more work than others is too much is a matter of the
seconds that it takes, and those are many for few tokens where nodes are slow.
"""

from router.policies import Candidate

WINDOW_TOKENS = 32_768
"""Most tokens for each node, on average, that are remembered in full."""
LEAST_WINDOW_TOKENS = 4096
WINDOW_S = 4.0
"""A window holds as much as a node computes in so many seconds, within these two."""


class RecentWork:
    """Keeps `Candidate.recent` of all nodes of a role."""

    def __init__(self) -> None:
        self._nodes: set[Candidate] = set()
        self._total = 0.0
        self._window = WINDOW_TOKENS

    def pace(self, tokens_per_s: float) -> None:
        """What a node computes; 0 while that is not known."""
        seconds = int(WINDOW_S * tokens_per_s) if tokens_per_s else WINDOW_TOKENS
        self._window = min(WINDOW_TOKENS, max(LEAST_WINDOW_TOKENS, seconds))

    def join(self, node: Candidate) -> None:
        """A node that is new begins with as much as the others have: it has missed nothing."""
        node.recent = self._total / len(self._nodes) if self._nodes else 0.0
        self._nodes.add(node)
        self._total += node.recent

    def give(self, node: Candidate, tokens: int) -> None:
        """A node was given work."""
        node.recent += tokens
        self._total += tokens
        while self._total > self._window * len(self._nodes):
            for other in self._nodes:
                other.recent /= 2
            self._total /= 2

    def forget(self, node: Candidate) -> None:
        """The node is gone."""
        self._nodes.discard(node)
        self._total -= node.recent
