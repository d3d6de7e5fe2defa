"""When a decode node computes a prompt itself, without a prefill node: pure decisions.

A transfer costs a round over two nodes and the network; computing beside the running batch costs
those who stream there a little longer step for each chunk. So decode computes what is short, and
what little it lacks of a long prompt that it mostly holds (conditional disaggregation, after
Dynamo's router; the thresholds' table is in `benchmarks/README.md`). It also computes everything
where no prefill node is left that could.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from common.messages import Incarnation
from router.policies import Candidate, Choose, Full, Pair

MOST_REST = 8
"""Of a prompt that decode mostly holds, it computes up to so many times `tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLimits:
    """See `RouterConfig`: `local_prefill_tokens`, `local_prefill_share`."""

    tokens: int = 32
    share: float = 0.9

    def computes_alone(self, known: int, overlap: int) -> bool:
        """Whether a decode node had better compute the rest of `known` tokens by itself, of which
        it has cached `overlap`."""
        lacking = known - overlap
        if lacking <= self.tokens:
            return True
        return overlap >= self.share * known and lacking <= MOST_REST * self.tokens


def pick_alone(
    decodes: Sequence[Candidate],
    *,
    tokens: int,
    avoid: Set[Incarnation],
    choose: Choose,
    suits: Callable[[Candidate], bool] | None = None,
) -> Pair | Full | None:
    """Choose the node of an attempt that may need `tokens` tokens of KV and no prefill node.

    `suits`: whether the chosen one should, else None; every one should if not given. None without
    `suits`: nobody can ever take it.
    """
    fitting = [c for c in decodes if c.capacity_tokens >= tokens]
    fitting = [c for c in fitting if c.incarnation not in avoid] or fitting
    if not fitting:
        return None
    free = [c for c in fitting if c.is_open and c.computes]
    if not free:
        return Full(frozenset(c.incarnation for c in fitting))
    chosen = choose(free)
    if suits is not None and not suits(chosen):
        return None
    return Pair(None, chosen.incarnation)
