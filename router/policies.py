"""Which prefill and which decode node get an attempt: pure functions over a snapshot.

Only pairs with equal fingerprints are ever chosen, since pages of one must fit the other. Nodes on
which this request already failed are chosen only when nothing else is left. A node without room is
not chosen now: the request waits for it at the router, where priority and cancellation reach it.
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
    is_open: bool = True
    """Whether it takes one more attempt now; not when it has enough to do."""
    computes: bool = True
    """Of a decode node: whether it takes one more prompt to compute itself."""


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Incarnation | None
    """None: decode computes the prompt itself."""
    decode: Incarnation


@dataclass(frozen=True, slots=True)
class Full:
    """Nodes could take it, but not now; `nodes` are those without room that it waits for."""

    nodes: frozenset[Incarnation]


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
) -> Pair | Full | None:
    """Choose the two nodes of an attempt that may need `tokens` tokens of KV on each.

    `prefer` is a prefill node that still has this request's prefix. None: nobody can ever take it.
    """
    fitting = [c for c in decodes if c.capacity_tokens >= tokens]
    partners: Mapping[Fingerprint, list[Candidate]] = _by_fingerprint(fitting)
    able = [c for c in prefills if c.capacity_tokens >= tokens and c.fingerprint in partners]
    if not able:
        return None
    able = _without(able, avoid)
    groups = {c.fingerprint for c in able}
    fitting = [c for group in groups for c in _without(partners[group], avoid)]
    open_decodes = [c for c in fitting if c.is_open]
    open_groups = _by_fingerprint(open_decodes)
    open_prefills = [c for c in able if c.is_open and c.fingerprint in open_groups]
    if not open_prefills:
        waits_for = [c for c in able if not c.is_open] if open_decodes else fitting
        return Full(frozenset(c.incarnation for c in waits_for))
    preferred = [c for c in open_prefills if c.incarnation == prefer]
    prefill = choose_prefill(preferred or open_prefills)
    decode = choose_decode(open_groups[prefill.fingerprint])
    return Pair(prefill.incarnation, decode.incarnation)


def _without(candidates: Sequence[Candidate], avoid: Set[Incarnation]) -> list[Candidate]:
    return [c for c in candidates if c.incarnation not in avoid] or list(candidates)


def _by_fingerprint(candidates: Sequence[Candidate]) -> dict[Fingerprint, list[Candidate]]:
    groups: dict[Fingerprint, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.fingerprint, []).append(candidate)
    return groups
