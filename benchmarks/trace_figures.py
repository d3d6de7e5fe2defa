"""What `benchmarks.trace` found, as rows of Markdown tables."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.overload import percentile
from benchmarks.replay import Answer, NodeCounts


@dataclass(slots=True)
class Figures:
    """Of one policy with one size of cache, all rounds together."""

    bound_tokens: int = 0
    """Prompt tokens that an infinite cache would not compute."""
    answers: list[Answer] = field(default_factory=list)
    counts: dict[str, NodeCounts] = field(default_factory=lambda: defaultdict(NodeCounts))
    """By node."""
    rounds: int = 0

    def add(
        self,
        answers: Sequence[Answer],
        before: Mapping[str, NodeCounts],
        after: Mapping[str, NodeCounts],
        bound_tokens: int,
    ) -> None:
        """Take in one round."""
        self.rounds += 1
        self.answers += answers
        self.bound_tokens += bound_tokens
        for name, counts in after.items():
            self.counts[name] += counts - before[name]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(answer.prompt) for answer in self.answers)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that nodes had to compute, as usage says."""
        return self.prompt_tokens - sum(answer.cached_tokens for answer in self.answers)

    @property
    def hit_rate(self) -> float:
        return 1 - self.computed_tokens / self.prompt_tokens

    @property
    def bound(self) -> float:
        return self.bound_tokens / self.prompt_tokens

    def cells(self) -> list[str]:
        ttft_ms = [answer.ttft_s * 1e3 for answer in self.answers]
        p50, p99 = percentile(ttft_ms, 0.5), percentile(ttft_ms, 0.99)
        sent = sum(counts.bytes_sent for counts in self.counts.values())
        return [
            f"{self.hit_rate:.1%}",
            f"{self.bound:.1%}",
            f"{self.computed_tokens / self.rounds:.0f}",
            f"{statistics.mean(ttft_ms):.0f}",
            f"{p50:.0f}",
            f"{p99:.0f}",
            f"{sent / self.rounds / 2**20:.0f}",
            self._spread("prefill"),
            self._spread("decode"),
        ]

    def _spread(self, role: str) -> str:
        """Requests of each node of a role, and the largest number over the smallest."""
        shares = [
            counts.requests for name, counts in sorted(self.counts.items()) if name.startswith(role)
        ]
        ratio = max(shares) / min(shares) if min(shares) else float("inf")
        return f"{' : '.join(map(str, shares))} ({ratio:.2f})"


HEADS = (
    "hit rate", "bound", "tokens computed", "TTFT mean ms", "p50", "p99", "MiB sent",
    "prefill nodes", "decode nodes",
)  # fmt: skip


def table(key: str, figures: Mapping[str, Figures]) -> str:
    """A row for each entry; `key` is the first column's head."""
    rows = [[key, *HEADS], ["---"] * (1 + len(HEADS))]
    rows += [[name, *one.cells()] for name, one in figures.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
