"""Where waiting jobs go, as far as nodes have room: one round over the queue. Pure.

Nodes get what they can soon run and a little more; the rest waits here. A job that must wait for
room keeps the nodes it waits for from those behind it, so that a large one is not overtaken for
ever; those behind it may still go to nodes that it could not use anyway. A job with an adapter can
use the nodes that hold its very content; where none of these has anything left, all jobs of that
adapter are passed over at once.

What is short, or mostly cached there, decode computes itself, and everything where no prefill node
is left; see `local_prefill`.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial

from common.messages import Adapter, Incarnation
from common.modes import DisaggregationMode
from router.cache_index import CacheIndex
from router.fleet import Fleet
from router.load import LoadBook
from router.nodes import NodeRegistry
from router.picking import Full, Group, Pair, Rules, Wish, pick_nodes
from router.policies import Work
from router.requests import Job
from router.waiting import WaitingRoom

MAX_SKIPPED = 256
"""Jobs that a round passes over at most before it ends."""


class Placement:
    """Knows the nodes, their loads, what they have cached, and the policies."""

    def __init__(
        self,
        registry: NodeRegistry,
        book: LoadBook,
        cache: CacheIndex,
        rules: Rules,
    ) -> None:
        self._registry = registry
        self._book = book
        self._cache = cache
        self._rules = rules
        self._fleet: Fleet | None = None
        self._found: dict[Adapter | None, Sequence[Group]] = {}
        """Of this fleet."""

    def round(self, waiting: WaitingRoom, tokens_per_s: float) -> Iterator[tuple[Job, Pair]]:
        """Jobs that may start now, each with its nodes, in the queue's order.

        The caller starts each before it asks for the next. `tokens_per_s`: the pace of one node
        that computes prompts.
        """
        skipped: list[Job] = []
        kept: set[Incarnation] = set()
        passed: set[Adapter | None] = set()
        for job in waiting.take_ready(passed):
            groups = self._groups(job.adapter)
            self._book.settle(tokens_per_s)
            pair = pick_nodes(groups, self._wish(job, kept), self._rules)
            if isinstance(pair, Pair):
                yield job, pair
                continue
            skipped.append(job)
            if isinstance(pair, Full):
                kept |= pair.nodes
            if not self._has_left(groups, kept):
                passed.add(job.adapter)
            if None in passed or len(skipped) >= MAX_SKIPPED:
                break  # what no job of the base model can use, nobody can
        for job in skipped:
            waiting.put(job)

    def has_room(self, tokens_per_s: float) -> bool:
        """Whether some pair of nodes would take a small request at once, or a decode node that has
        to work alone."""
        groups = self._groups(None)
        self._book.settle(tokens_per_s)
        for group in groups:
            if any(c.is_open for c in group.prefills) and any(c.is_open for c in group.decodes):
                return True
            if self._is_alone(group) and any(c.is_open and c.computes for c in group.decodes):
                return True
        return False

    def tokens_to_prefill(self) -> int:
        """Prompt tokens that nodes still have to compute."""
        return self._book.tokens_to_prefill

    def num_computing(self) -> int:
        """Nodes that compute prompts, now or after a pause."""
        return self._registry.fleet.num_computing

    def _groups(self, adapter: Adapter | None) -> Sequence[Group]:
        """The nodes that take work of an adapter now; found once for each change among them."""
        fleet = self._registry.fleet
        if fleet is not self._fleet:
            self._fleet, self._found = fleet, {}
        groups = self._found.get(adapter)
        if groups is None:
            groups = self._found[adapter] = self._find_groups(fleet, adapter)
        return groups

    def _find_groups(self, fleet: Fleet, adapter: Adapter | None) -> Sequence[Group]:
        served = {self._book.kind(kind) for kind in fleet.prefill_groups(adapter)}
        prefills, decodes = (
            [
                self._book.candidate(node)
                for node in fleet.of_role(role)
                if node.takes_work and node.holds(adapter)
            ]
            for role in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
        )
        return [
            Group(
                [c for c in prefills if c.kind == kind],
                [c for c in decodes if c.kind == kind],
                served=kind in served,
            )
            for kind in dict.fromkeys(c.kind for c in decodes)
        ]

    def _is_alone(self, group: Group) -> bool:
        return self._rules.decode_alone and not group.served

    def _has_left(self, groups: Sequence[Group], kept: Set[Incarnation]) -> bool:
        """Whether jobs behind may still use any of these nodes."""
        return any(
            any(c.incarnation not in kept for c in group.decodes)
            and (self._is_alone(group) or any(c.incarnation not in kept for c in group.prefills))
            for group in groups
        )

    def _wish(self, job: Job, kept: Set[Incarnation]) -> Wish:
        return Wish(
            tokens=job.max_total_tokens,
            work=Work(job.known_tokens, session=job.session, find=partial(self._cached, job)),
            avoid=job.avoid,
            kept=kept,
            computed_whole=job.sampling.prompt_logprobs is not None,
            prefers_pair=job.prefers_pair,
        )

    def _cached(self, job: Job) -> Mapping[Incarnation, int]:
        """How many of a job's tokens each node has cached, as far as a hit may use them."""
        found: dict[Incarnation, int] = {}
        if not len(self._cache):
            return found
        tokens = job.prompt_ids + job.output_ids if job.output_ids else job.prompt_ids
        for lineage in self._registry.fleet.lineages:
            page_size = lineage.fingerprint.page_size
            pages = self._cache.match(job.page_keys.of_prefix(lineage, tokens))
            found.update((node, depth * page_size) for node, depth in pages.items())
        return found
