"""Where waiting jobs go, as far as nodes have room: one round over the queue. Pure.

Nodes get what they can soon run and a little more; the rest waits here. A job that must wait for
room keeps the nodes it waits for from those behind it, so that a large one is not overtaken for
ever; those behind it may still go to nodes that it could not use anyway. A job with an adapter can
use the nodes that hold its very content; where none of these has anything left, all jobs of that
adapter are passed over at once.

What is short decode computes itself, and everything where no prefill node is left; see
`local_prefill`.
"""

from collections.abc import Iterator
from functools import partial

from common.messages import Adapter, Incarnation
from common.modes import DisaggregationMode
from router.load import LoadBook
from router.local_prefill import LocalLimits, pick_alone
from router.nodes import NodeRegistry
from router.policies import Candidate, Choose, Full, Pair, pick_pair
from router.requests import Job
from router.waiting import WaitingRoom

MAX_SKIPPED = 256
"""Jobs that a round passes over at most before it ends."""


class Placement:
    """Knows the nodes, their loads and the policies."""

    def __init__(
        self,
        registry: NodeRegistry,
        book: LoadBook,
        local: LocalLimits,
        *,
        choose_prefill: Choose,
        choose_decode: Choose,
    ) -> None:
        self._registry = registry
        self._book = book
        self._local = local
        self._choose_prefill = choose_prefill
        self._choose_decode = choose_decode

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
            alone = self._registry.decode_alone and not left[0]
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
        return prefills or (decodes if self._registry.decode_alone else 0)

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
        if not self._registry.decode_alone or not decodes:
            return []
        groups = self._registry.prefill_groups(adapter)
        return [c for c in decodes if c.fingerprint not in groups]

    def _pick(
        self, job: Job, prefills: list[Candidate], decodes: list[Candidate]
    ) -> Pair | Full | None:
        """A pair, or a decode node that computes alone; what it waits for; None: nobody can."""
        pick = partial(
            pick_alone, tokens=job.max_total_tokens, avoid=job.avoid, choose=self._choose_decode
        )
        if not job.prefers_pair and self._local.computes_alone(job.known_tokens, 0):
            alone = pick(decodes)
            if isinstance(alone, Pair):
                return alone
        pair = self._pick_pair(job, prefills, decodes)
        if isinstance(pair, Pair) and pair.prefill not in job.avoid:
            return pair
        # Every prefill node is full, has failed this request, or is none.
        others = decodes if isinstance(pair, Pair) else self._alone(job.adapter, decodes)
        alone = pick(others) if self._registry.decode_alone else None
        return alone if isinstance(alone, Pair) or pair is None else pair

    def _pick_pair(
        self, job: Job, prefills: list[Candidate], decodes: list[Candidate]
    ) -> Pair | Full | None:
        return pick_pair(
            prefills,
            decodes,
            tokens=job.max_total_tokens,
            avoid=job.avoid,
            prefer=job.prefer,
            choose_prefill=self._choose_prefill,
            choose_decode=self._choose_decode,
        )
