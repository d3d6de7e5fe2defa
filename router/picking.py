"""Which nodes take an attempt: a prefill and a decode node, or a decode node alone. Pure.

Only pairs with equal fingerprints are ever chosen, since pages of one must fit the other. Nodes on
which this request already failed are chosen only when nothing else is left. A node without room is
not chosen now: the request waits for it at the router, where priority and cancellation reach it.

Decode is chosen first, once: how much of the prompt it has cached decides whether it computes the
rest itself. The prefill node is then chosen among those whose pages fit.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import msgspec

from common.messages import Incarnation
from router.local_prefill import LocalLimits
from router.policies import Candidate, Choose, Work


class Pair(msgspec.Struct, frozen=True):
    prefill: Incarnation | None
    """None: decode computes the prompt itself."""
    decode: Incarnation
    computer_has: int = 0
    """Tokens that whoever computes the prompt has cached."""
    decode_has: int = 0
    """Tokens that the decode node has cached: they are not sent."""


class Full(msgspec.Struct, frozen=True):
    """Nodes could take it, but not now; `nodes` are those without room that it waits for."""

    nodes: frozenset[Incarnation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How this router picks."""

    choose_prefill: Choose
    choose_decode: Choose
    local: LocalLimits
    decode_alone: bool = False
    """Whether decode computes prompts where no prefill node can."""
    waits_for_cached: bool = False
    """Whether a prompt waits for a prefill node without room, where the policy finds it better than
    those with room because of what it has cached. Else the policy never sees it."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that looks for nodes."""

    tokens: int
    """KV that it may need on each of them."""
    work: Work
    avoid: Set[Incarnation] = frozenset()
    """Nodes on which it failed."""
    kept: Set[Incarnation] = frozenset()
    """Nodes that wait for a request before this one: as if they were not there."""
    computed_whole: bool = False
    """Who computes the prompt cannot use what it has cached of it."""
    prefers_pair: bool = False
    """Decode shall compute the prompt only where nobody else can."""

    @property
    def computing(self) -> Work:
        """The work as who computes the prompt has to do it."""
        return self.work.computed_whole() if self.computed_whole else self.work


class Group(msgspec.Struct, frozen=True):
    """Nodes of one kind: their pages fit each other."""

    prefills: Sequence[Candidate]
    decodes: Sequence[Candidate]
    served: bool = True
    """Whether some prefill node makes such pages, now or later; else decode has to work alone."""


def pick_nodes(groups: Sequence[Group], wish: Wish, rules: Rules) -> Pair | Full | None:
    """Choose an attempt's nodes. None: nobody can ever take it."""
    return _pick_ready(groups, wish, rules) or _pick_otherwise(groups, wish, rules)


def _pick_ready(groups: Sequence[Group], wish: Wish, rules: Rules) -> Pair | Full | None:
    """What nearly always happens: some pair of nodes is open, and none of them has failed it.

    Full: it had better wait for a node that has it cached. None: this is another case.
    """
    ready: dict[int, list[Candidate]] = {}
    decodes: list[Candidate] = []
    for group in groups:
        open_prefills = _open(group.prefills, wish)
        open_decodes = _open(group.decodes, wish) if open_prefills else []
        if open_decodes:
            ready[open_decodes[0].kind] = open_prefills
            decodes += open_decodes
    if not decodes:
        return None
    decode = rules.choose_decode(decodes, wish.work)
    alone = _as_it_has(decode, wish, rules)
    if alone is not None:
        return alone
    work = wish.computing
    choice = ready[decode.kind]
    if rules.waits_for_cached and work.cached:
        choice = [
            c
            for group in groups
            for c in group.prefills
            if c.kind == decode.kind
            and c.capacity_tokens >= wish.tokens
            and c.incarnation not in wish.avoid
        ]
    prefill = rules.choose_prefill(choice, work)
    if not prefill.is_open or prefill.incarnation in wish.kept:
        return Full(frozenset({prefill.incarnation}))
    return Pair(
        prefill.incarnation,
        decode.incarnation,
        computer_has=work.cached.get(prefill.incarnation, 0),
        decode_has=wish.work.cached.get(decode.incarnation, 0),
    )


def _as_it_has(decode: Candidate, wish: Wish, rules: Rules) -> Pair | None:
    """The chosen decode node alone, if it had better compute the rest itself."""
    if wish.prefers_pair or not decode.computes:
        return None
    has = wish.work.cached.get(decode.incarnation, 0)
    if not rules.local.computes_alone(wish.work.known_tokens, has):
        return None
    return Pair(None, decode.incarnation, has, has)


def _pick_otherwise(groups: Sequence[Group], wish: Wish, rules: Rules) -> Pair | Full | None:
    """Nodes are full, have failed this request, or are missing."""
    pairs, lonely = [], []
    for group in groups:
        prefills, decodes = _fitting(group.prefills, wish), _fitting(group.decodes, wish)
        if prefills and decodes:
            pairs.append(Group(prefills, decodes))
        if rules.decode_alone and not group.served:
            lonely += decodes
    able = [c for group in pairs for c in group.prefills]
    if not able:
        return _pick_alone(lonely, wish, rules)
    if rules.decode_alone and all(c.incarnation in wish.avoid for c in able):
        everywhere = [c for group in pairs for c in group.decodes]
        alone = _pick_alone([*everywhere, *lonely], wish, rules)
        if isinstance(alone, Pair):
            return alone
    pair = _pick_pair(pairs, wish, rules)
    if isinstance(pair, Full) and lonely:
        alone = _pick_alone(lonely, wish, rules)
        return alone if isinstance(alone, Pair) else pair
    return pair


def _pick_pair(pairs: Sequence[Group], wish: Wish, rules: Rules) -> Pair | Full:
    """Two nodes, those that failed it among them; or decode alone though prefill is full."""
    avoid = wish.avoid
    if any(c.incarnation not in avoid for group in pairs for c in group.prefills):
        kept = [
            Group([c for c in group.prefills if c.incarnation not in avoid], group.decodes)
            for group in pairs
        ]
        pairs = [group for group in kept if group.prefills]
    pairs = [Group(group.prefills, _without(group.decodes, avoid)) for group in pairs]
    last_resort = msgspec.structs.replace(wish, avoid=frozenset())
    pair = _pick_ready(pairs, last_resort, rules)
    if pair is not None:
        return pair
    waits_for = [c for group in pairs for c in group.decodes]
    open_decodes = [c for c in waits_for if c.is_open]
    could = [] if wish.prefers_pair else [c for c in open_decodes if c.computes]
    if could:
        alone = _as_it_has(rules.choose_decode(could, wish.work), wish, rules)
        if alone is not None:
            return alone
    if open_decodes:
        waits_for = [c for group in pairs for c in group.prefills if not c.is_open]
    return Full(frozenset(c.incarnation for c in waits_for))


def _pick_alone(decodes: Sequence[Candidate], wish: Wish, rules: Rules) -> Pair | Full | None:
    """One of these, which computes the prompt too."""
    if not decodes:
        return None
    fitting = _without(decodes, wish.avoid)
    free = [c for c in fitting if c.is_open and c.computes]
    if not free:
        return Full(frozenset(c.incarnation for c in fitting))
    decode = rules.choose_decode(free, wish.computing)
    has = wish.computing.cached.get(decode.incarnation, 0)
    return Pair(None, decode.incarnation, has, has)


def _open(candidates: Sequence[Candidate], wish: Wish) -> list[Candidate]:
    tokens, out = wish.tokens, wish.avoid | wish.kept
    found = [c for c in candidates if c.is_open and c.capacity_tokens >= tokens]
    return [c for c in found if c.incarnation not in out] if out else found


def _fitting(candidates: Sequence[Candidate], wish: Wish) -> list[Candidate]:
    tokens, kept = wish.tokens, wish.kept
    return [c for c in candidates if c.capacity_tokens >= tokens and c.incarnation not in kept]


def _without(candidates: Sequence[Candidate], avoid: Set[Incarnation]) -> Sequence[Candidate]:
    return [c for c in candidates if c.incarnation not in avoid] or candidates
