"""How busy each node is: what this router has on it, and what it said itself. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from common.messages import Incarnation, Room
from router.nodes import Node
from router.policies import Candidate
from router.requests import Attempt, Job


@dataclass(frozen=True, slots=True)
class _Share:
    """What one attempt means to its two nodes, in tokens."""

    prefill: Incarnation
    decode: Incarnation
    prompt_tokens: int
    held_tokens: int


class LoadBook:
    """Load per node, in tokens: prefill by what it has to compute, decode by what it holds.

    A node's heartbeat also counts other routers' work, but is up to a beat old; our own book is
    exact for our own. The larger of the two is taken.
    """

    def __init__(self) -> None:
        self._shares: dict[Room, _Share] = {}
        self._computing: set[Room] = set()
        self._tokens: Counter[Incarnation] = Counter()

    def add(self, room: Room, job: Job, attempt: Attempt) -> None:
        """An attempt begins."""
        known = len(job.prompt_ids) + len(job.output_ids)
        share = _Share(attempt.prefill, attempt.decode, known, job.max_total_tokens)
        self._shares[room] = share
        self._computing.add(room)
        self._tokens[share.prefill] += share.prompt_tokens
        self._tokens[share.decode] += share.held_tokens

    def computed(self, room: Room) -> None:
        """The prompt is done: the prefill node has nothing more to compute for it."""
        if room in self._computing:
            self._computing.remove(room)
            self._take(self._shares[room].prefill, self._shares[room].prompt_tokens)

    def remove(self, room: Room) -> None:
        """The attempt is over."""
        self.computed(room)
        share = self._shares.pop(room)
        self._take(share.decode, share.held_tokens)

    def candidates(self, nodes: Iterable[Node]) -> list[Candidate]:
        """The nodes that take work, with their loads."""
        return [
            Candidate(
                node.incarnation,
                node.hello.fingerprint,
                node.capacity_tokens,
                float(max(self._tokens[node.incarnation], node.stats.queued_tokens)),
            )
            for node in nodes
            if node.takes_work
        ]

    def _take(self, node: Incarnation, tokens: int) -> None:
        self._tokens[node] -= tokens
        if not self._tokens[node]:
            del self._tokens[node]
