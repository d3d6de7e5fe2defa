"""When a decode node computes a prompt itself, without a prefill node: pure decisions.

A transfer costs a round over two nodes and the network; computing beside the running batch costs
those who stream there a little longer step for each chunk. So decode computes what is short, and
what little it lacks of a long prompt that it mostly holds (conditional disaggregation, after
Dynamo's router; the thresholds' table is in `benchmarks/README.md`). It also computes everything
where no prefill node is left that could.
"""

from dataclasses import dataclass

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
