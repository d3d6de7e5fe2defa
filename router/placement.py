"""Where waiting jobs go, as far as nodes have room: one round over the queue. Pure.

Nodes get what they can soon run and a little more; the rest waits here. A job that must wait for
room keeps the nodes it waits for from those behind it, so that a large one is not overtaken for
ever; those behind it may still go to nodes that it could not use anyway. A job with an adapter can
use the nodes that hold its very content; where none of these has anything left, all jobs of that
adapter are passed over at once.

What is short, or mostly cached there, decode computes itself, and everything where no prefill node
is left; see `local_prefill`.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from common.messages import Adapter, Incarnation
from common.modes import DisaggregationMode
from router.cache_index import CacheIndex
from router.load import LoadBook
from router.nodes import NodeRegistry
from router.picking import Full, Pair, Rules, Wish, pick_nodes
from router.policies import Candidate, Work
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

    def round(self, waiting: WaitingRoom, tokens_per_s: float) -> Iterator[tuple[Job, Pair]]:
        """Jobs that may start now, each with its nodes, in the queue's order.

        The caller starts each before it asks for the next. `tokens_per_s`: the pace of one node
        that computes prompts.
        """
        skipped: list[Job] = []
        kept: set[Incarnation] = set()
        passed: set[Adapter | None] = set()
        for job in waiting.take_ready(passed):
            prefills, decodes = self._candidates(job.adapter, kept, tokens_per_s)
            pair = self._pick(job, prefills, decodes)
            if isinstance(pair, Pair):
                yield job, pair
                continue
            skipped.append(job)
            if isinstance(pair, Full):
                kept |= pair.nodes
            left = {c.incarnation for c in prefills} - kept, {c.incarnation for c in decodes} - kept
            alone = self._rules.decode_alone and not left[0]
            if not left[1] or not (left[0] or (alone and self._alone(job.adapter, decodes))):
                passed.add(job.adapter)
            if None in passed or len(skipped) >= MAX_SKIPPED:
                break  # what no job of the base model can use, nobody can
        for job in skipped:
            waiting.put(job)

    def has_room(self, tokens_per_s: float) -> bool:
        """Whether some pair of nodes would take a small request at once, or a decode node that has
        to work alone."""
        prefills, decodes = self._candidates(None, set(), tokens_per_s)
        open_groups = {c.fingerprint for c in decodes if c.is_open}
        if any(c.is_open and c.fingerprint in open_groups for c in prefills):
            return True
        return any(c.is_open and c.computes for c in self._alone(None, decodes))

    def tokens_to_prefill(self) -> int:
        """Prompt tokens that nodes still have to compute."""
        return self._book.tokens_to_prefill(self._registry.of_role(DisaggregationMode.PREFILL))

    def num_computing(self) -> int:
        """Nodes that compute prompts, now or after a pause: prefill's, or decode's where there is
        none."""
        prefills, decodes = (
            sum(node.stays for node in self._registry.of_role(role))
            for role in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
        )
        return prefills or (decodes if self._rules.decode_alone else 0)

    def _candidates(
        self, adapter: Adapter | None, kept: set[Incarnation], tokens_per_s: float
    ) -> tuple[list[Candidate], list[Candidate]]:
        prefills, decodes = (
            [
                node
                for node in self._registry.of_role(role)
                if node.holds(adapter) and node.incarnation not in kept
            ]
            for role in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
        )
        return (
            self._book.prefill_candidates(prefills, tokens_per_s),
            self._book.decode_candidates(decodes, tokens_per_s),
        )

    def _alone(self, adapter: Adapter | None, decodes: list[Candidate]) -> list[Candidate]:
        """Those of `decodes` that no prefill node could help."""
        if not self._rules.decode_alone or not decodes:
            return []
        groups = self._registry.prefill_groups(adapter)
        return [c for c in decodes if c.fingerprint not in groups]

    def _pick(
        self, job: Job, prefills: list[Candidate], decodes: list[Candidate]
    ) -> Pair | Full | None:
        wish = Wish(
            tokens=job.max_total_tokens,
            work=Work(job.known_tokens, session=job.session, find=partial(self._cached, job)),
            avoid=job.avoid,
            computed_whole=job.sampling.prompt_logprobs is not None,
            prefers_pair=job.prefers_pair,
        )
        served = self._registry.prefill_groups(job.adapter)
        return pick_nodes(prefills, decodes, wish, self._rules, served)

    def _cached(self, job: Job) -> Mapping[Incarnation, int]:
        """How many of a job's tokens each node has cached, as far as a hit may use them."""
        found: dict[Incarnation, int] = {}
        if not len(self._cache):
            return found
        tokens = job.prompt_ids + job.output_ids if job.output_ids else job.prompt_ids
        for lineage in self._registry.lineages():
            page_size = lineage.fingerprint.page_size
            pages = self._cache.match(job.page_keys.of_prefix(lineage, tokens))
            found.update((node, depth * page_size) for node, depth in pages.items())
        return found
