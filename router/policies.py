"""Which prefill and which decode node get an attempt: pure functions over a snapshot.

Only pairs with equal fingerprints are ever chosen, since pages of one must fit the other. Nodes on
which this request already failed are chosen only when nothing else is left.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from random import Random

from common.messages import Fingerprint, Incarnation
from router.config import PolicyName


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may take work now."""

    incarnation: Incarnation
    fingerprint: Fingerprint
    capacity_tokens: int
    load: float
    """What waits or runs there, in one unit for all candidates of a role; smaller is better."""


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Incarnation
    decode: Incarnation


Choose = Callable[[Sequence[Candidate]], Candidate]
"""Picks one of a non-empty sequence."""


def random_choice(random: Random) -> Choose:
    return random.choice


def round_robin() -> Choose:
    """Each candidate in turn, by the order in which they were last chosen."""
    turn = 0
    last: dict[Incarnation, int] = {}

    def choose(candidates: Sequence[Candidate]) -> Candidate:
        nonlocal turn
        turn += 1
        chosen = min(candidates, key=lambda c: last.get(c.incarnation, 0))
        last[chosen.incarnation] = turn
        return chosen

    return choose


def least_loaded(random: Random) -> Choose:
    """The smallest load; equals are drawn by chance, so that several routers do not agree."""

    def choose(candidates: Sequence[Candidate]) -> Candidate:
        smallest = min(c.load for c in candidates)
        return random.choice([c for c in candidates if c.load == smallest])

    return choose


def make_choice(name: PolicyName, random: Random) -> Choose:
    match name:
        case "random":
            return random_choice(random)
        case "round_robin":
            return round_robin()
        case "least_loaded":
            return least_loaded(random)


def pick_pair(
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    *,
    tokens: int,
    avoid: Set[Incarnation],
    prefer: Incarnation | None,
    choose_prefill: Choose,
    choose_decode: Choose,
) -> Pair | None:
    """Choose the two nodes of an attempt that may need `tokens` tokens of KV on each.

    `prefer` is a prefill node that still has this request's prefix. None: nobody can take it now.
    """
    fitting = [c for c in decodes if c.capacity_tokens >= tokens]
    partners: Mapping[Fingerprint, list[Candidate]] = _by_fingerprint(fitting)
    able = [c for c in prefills if c.capacity_tokens >= tokens and c.fingerprint in partners]
    if not able:
        return None
    preferred = [c for c in able if c.incarnation == prefer and c.incarnation not in avoid]
    prefill = choose_prefill(preferred or _without(able, avoid))
    decode = choose_decode(_without(partners[prefill.fingerprint], avoid))
    return Pair(prefill.incarnation, decode.incarnation)


def _without(candidates: Sequence[Candidate], avoid: Set[Incarnation]) -> Sequence[Candidate]:
    return [c for c in candidates if c.incarnation not in avoid] or candidates


def _by_fingerprint(candidates: Sequence[Candidate]) -> dict[Fingerprint, list[Candidate]]:
    groups: dict[Fingerprint, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.fingerprint, []).append(candidate)
    return groups
