"""Which node of a role gets an attempt: pure functions over candidates and the work to be placed.

    prefill   cost = tokens waiting there + COMPUTE_WEIGHT * tokens it would have to compute
    decode    cost = tokens held there    + tokens that would have to be sent there

Both in tokens of work; what is cached is what a node need not compute, or be sent. The formula, its
sources and its limits are in `docs/routing.md`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from common.messages import Incarnation
from router.config import PolicyName

COMPUTE_WEIGHT = 4.0
"""So many tokens that wait on a prefill node are as bad as one more that has to be computed:
waiting costs this request, computing again what another node has costs all that come after it too.
Chosen on Mooncake's trace (`benchmarks.trace`): 1 gives away a tenth of the hits and is slower,
from 4 to 6 nothing changes, far more leaves nodes idle beside busy ones."""
FAIR_SHARE = 1.25
"""So many times the calmest one's recent work a node may have before its cache counts for less."""
SESSION_LOAD = 1.25
"""So many times the mean load a session's node may have, and a prompt more."""
SLACK_TOKENS = 1024
"""Tokens that a node may have more in any case: what is hardly any work is no overload."""
_64_BITS = 2**64 - 1


@dataclass(slots=True, eq=False)
class Candidate:
    """A node that may take work now, as the load book keeps it. Policies only read it."""

    incarnation: Incarnation
    kind: int
    """Nodes of one kind make pages that fit each other: their fingerprints are equal."""
    capacity_tokens: int
    load: float = 0.0
    """What waits or runs there, in one unit for all candidates of a role; smaller is better."""
    is_open: bool = True
    """Whether it takes one more attempt now; not when it has enough to do."""
    computes: bool = True
    """Of a decode node: whether it takes one more prompt to compute itself."""
    recent: float = 0.0
    """Tokens of work that it was given of late, in the same unit."""
    place: int = 0
    """Where it stands among the nodes that sessions are spread over."""


class Work:
    """What is to be placed, as far as a policy looks at it."""

    __slots__ = ("_cached", "_find", "known_tokens", "session")

    def __init__(
        self,
        known_tokens: int,
        *,
        session: str = "",
        find: Callable[[], Mapping[Incarnation, int]] = dict,
    ) -> None:
        """`find` says how many of the first tokens each node has cached, those with none left out;
        it is asked at most once, and not before somebody wants to know."""
        self.known_tokens = known_tokens
        self.session = session
        self._find = find
        self._cached: Mapping[Incarnation, int] | None = None

    @property
    def cached(self) -> Mapping[Incarnation, int]:
        """Tokens that each node has cached."""
        if self._cached is None:
            self._cached = self._find()
        return self._cached

    def computed_whole(self) -> "Work":
        """The same for a node that may use nothing it has cached."""
        return Work(self.known_tokens, session=self.session)


Choose = Callable[[Sequence[Candidate], Work], Candidate]
"""Picks one of a non-empty sequence."""


def random_choice(random: Random) -> Choose:
    return lambda candidates, _: random.choice(candidates)


def round_robin() -> Choose:
    """Each candidate in turn, by the order in which they were last chosen."""
    turn = 0
    last: dict[Incarnation, int] = {}

    def choose(candidates: Sequence[Candidate], _: Work) -> Candidate:
        nonlocal turn
        turn += 1
        chosen = min(candidates, key=lambda c: last.get(c.incarnation, 0))
        last[chosen.incarnation] = turn
        return chosen

    return choose


def least_loaded(random: Random) -> Choose:
    """The smallest load; equals are drawn by chance, so that several routers do not agree."""

    def choose(candidates: Sequence[Candidate], _: Work) -> Candidate:
        smallest = min([c.load for c in candidates])
        return random.choice([c for c in candidates if c.load == smallest])

    return choose


def power_of_two(random: Random) -> Choose:
    """The less loaded of two that are drawn by chance: nearly as even as looking at all of them,
    and routers with stale numbers do not all run to the same node (Mitzenmacher)."""

    def choose(candidates: Sequence[Candidate], _: Work) -> Candidate:
        if len(candidates) == 1:
            return candidates[0]
        one, other = random.sample(candidates, 2)
        return one if one.load <= other.load else other

    return choose


def cache_aware(random: Random, weight: float = 1.0) -> Choose:
    """The smallest sum of what is there already and `weight` times what this work adds; among
    equals the one with the least recent work, then by chance.

    A node with more than its share of recent work is given less credit for what it has cached, down
    to none. So a prefix that everybody shares is soon computed on every node, and what only one
    conversation has stays where it is.
    """

    def choose(candidates: Sequence[Candidate], work: Work) -> Candidate:
        cached = work.cached
        if cached:
            fair = FAIR_SHARE * min([c.recent for c in candidates]) + SLACK_TOKENS
            costs = [
                c.load - weight * max(0.0, cached.get(c.incarnation, 0) - max(0.0, c.recent - fair))
                for c in candidates
            ]
        else:
            costs = [c.load for c in candidates]
        smallest = min(costs)
        best = [c for c, cost in zip(candidates, costs, strict=True) if cost == smallest]
        if len(best) > 1:
            calmest = min([c.recent for c in best])
            best = [c for c in best if c.recent == calmest]
        return random.choice(best)

    return choose


def with_sessions(otherwise: Choose) -> Choose:
    """Work that names a session goes where the session's last work went, as long as that node is
    among the candidates and not overloaded; then to the next one in the session's own order.

    The order is by rendezvous hashing, so that a node which comes or goes moves only its share of
    the sessions, and routers agree without a word. The bound on the load is that of consistent
    hashing with bounded loads.
    """

    def choose(candidates: Sequence[Candidate], work: Work) -> Candidate:
        if not work.session:
            return otherwise(candidates, work)
        mean = sum([c.load for c in candidates]) / len(candidates)
        limit = SESSION_LOAD * mean + max(work.known_tokens, SLACK_TOKENS)
        near = place_of(work.session)
        return max([c for c in candidates if c.load <= limit], key=lambda c: _mixed(near ^ c.place))

    return choose


def place_of(name: str) -> int:
    """Where a session or a node stands; the same in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _mixed(number: int) -> int:
    """Every bit of 64 depends on every bit (the finalizer of splitmix64)."""
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _64_BITS
    return number ^ number >> 31


def make_choice(name: PolicyName, random: Random, weight: float = 1.0) -> Choose:
    """A policy by its name. `weight`: see `cache_aware`."""
    match name:
        case "random":
            choose = random_choice(random)
        case "round_robin":
            choose = round_robin()
        case "least_loaded":
            choose = least_loaded(random)
        case "power_of_two":
            choose = power_of_two(random)
        case "cache_aware":
            choose = cache_aware(random, weight)
    return with_sessions(choose)
