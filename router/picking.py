"""Which nodes take an attempt: a prefill and a decode node, or a decode node alone. Pure.

Only pairs with equal fingerprints are ever chosen, since pages of one must fit the other. Nodes on
which this request already failed are chosen only when nothing else is left. A node without room is
not chosen now: the request waits for it at the router, where priority and cancellation reach it.

Decode is chosen first, once: how much of the prompt it has cached decides whether it computes the
rest itself. The prefill node is then chosen among those whose pages fit.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from common.messages import Fingerprint, Incarnation
from router.local_prefill import LocalLimits
from router.policies import Candidate, Choose, Work


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Incarnation | None
    """None: decode computes the prompt itself."""
    decode: Incarnation
    computer_has: int = 0
    """Tokens that whoever computes the prompt has cached."""
    decode_has: int = 0
    """Tokens that the decode node has cached: they are not sent."""


@dataclass(frozen=True, slots=True)
class Full:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """An attempt that looks for nodes."""

    tokens: int
    """KV that it may need on each of them."""
    work: Work
    avoid: Set[Incarnation] = frozenset()
    """Nodes on which it failed."""
    computed_whole: bool = False
    """Who computes the prompt cannot use what it has cached of it."""
    prefers_pair: bool = False
    """Decode shall compute the prompt only where nobody else can."""

    @property
    def computing(self) -> Work:
        """The work as who computes the prompt has to do it."""
        return self.work.computed_whole() if self.computed_whole else self.work


def pick_nodes(
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    wish: Wish,
    rules: Rules,
    served: Set[Fingerprint],
) -> Pair | Full | None:
    """Choose an attempt's nodes. None: nobody can ever take it.

    `served`: the kinds of pages that some prefill node makes, now or later; decode nodes of other
    kinds have to work alone.
    """
    fitting = [c for c in decodes if c.capacity_tokens >= wish.tokens]
    partners = _by_fingerprint(fitting)
    able = [c for c in prefills if c.capacity_tokens >= wish.tokens and c.fingerprint in partners]
    lonely = [c for c in fitting if c.fingerprint not in served] if rules.decode_alone else []
    if not able:
        return _pick_alone(lonely, wish, rules)
    if rules.decode_alone and all(c.incarnation in wish.avoid for c in able):
        alone = _pick_alone(fitting, wish, rules)
        if isinstance(alone, Pair):
            return alone
    pair = _pick_pair(_without(able, wish.avoid), partners, wish, rules)
    if isinstance(pair, Full) and lonely:
        alone = _pick_alone(lonely, wish, rules)
        return alone if isinstance(alone, Pair) else pair
    return pair


def _pick_pair(
    able: Sequence[Candidate],
    partners: Mapping[Fingerprint, list[Candidate]],
    wish: Wish,
    rules: Rules,
) -> Pair | Full:
    """Two nodes, or one where it had better work alone though others could help."""
    groups = {c.fingerprint for c in able}
    fitting = [c for group in groups for c in _without(partners[group], wish.avoid)]
    open_decodes = [c for c in fitting if c.is_open]
    open_prefills = _by_fingerprint([c for c in able if c.is_open])
    ready = [c for c in open_decodes if c.fingerprint in open_prefills]
    could = ready if ready or wish.prefers_pair else [c for c in open_decodes if c.computes]
    if could:
        decode = rules.choose_decode(could, wish.work)
        has = wish.work.cached.get(decode.incarnation, 0)
        may_alone = decode.computes and not wish.prefers_pair
        if may_alone and rules.local.computes_alone(wish.work.known_tokens, has):
            return Pair(None, decode.incarnation, has, has)
        if ready:
            work = wish.computing
            prefill = rules.choose_prefill(open_prefills[decode.fingerprint], work)
            computer_has = work.cached.get(prefill.incarnation, 0)
            return Pair(prefill.incarnation, decode.incarnation, computer_has, has)
    waits_for = [c for c in able if not c.is_open] if open_decodes else fitting
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


def _without(candidates: Sequence[Candidate], avoid: Set[Incarnation]) -> Sequence[Candidate]:
    if not avoid:
        return candidates
    return [c for c in candidates if c.incarnation not in avoid] or candidates


def _by_fingerprint(candidates: Sequence[Candidate]) -> dict[Fingerprint, list[Candidate]]:
    groups: dict[Fingerprint, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.fingerprint, []).append(candidate)
    return groups
