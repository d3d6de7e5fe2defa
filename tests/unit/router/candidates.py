"""Candidates and picks for the tests of policies."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from router.local_prefill import LocalLimits
from router.picking import Full, Group, Pair, Rules, Wish, pick_nodes
from router.policies import Candidate, Work, place_of, round_robin

NO_LOCAL = LocalLimits(tokens=0, share=1.0)


def candidate(
    name: str,
    load: float = 0.0,
    capacity: int = 1000,
    page_size: int = 16,
    is_open: bool = True,
    *,
    computes: bool = True,
    recent: float = 0.0,
) -> Candidate:
    place = place_of(name)
    return Candidate(name, page_size, capacity, load, is_open, computes, recent, place)


def grouped(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> list[Group]:
    """By the kinds of decode's pages; `prefills` are all that there are."""
    groups = []
    for kind in dict.fromkeys(c.kind for c in decodes):
        fitting = [c for c in prefills if c.kind == kind]
        groups.append(Group(fitting, [c for c in decodes if c.kind == kind], served=bool(fitting)))
    return groups


def work(
    known: int = 100, session: str = "", cached: Mapping[str, int] = MappingProxyType({})
) -> Work:
    """`cached`: tokens by node."""
    return Work(known, session=session, find=lambda: cached)


def pick(
    prefills: list[Candidate],
    decodes: list[Candidate],
    *,
    tokens: int = 10,
    avoid: set[str] | None = None,
    known: int = 100,
    cached: Mapping[str, int] | None = None,
    local: LocalLimits = NO_LOCAL,
    decode_alone: bool = False,
    prefers_pair: bool = False,
    computed_whole: bool = False,
) -> Pair | Full | None:
    wish = Wish(
        tokens=tokens,
        work=work(known, cached=cached or {}),
        avoid=avoid or set(),
        prefers_pair=prefers_pair,
        computed_whole=computed_whole,
    )
    rules = Rules(
        choose_prefill=round_robin(),
        choose_decode=round_robin(),
        local=local,
        decode_alone=decode_alone,
    )
    return pick_nodes(grouped(prefills, decodes), wish, rules)
