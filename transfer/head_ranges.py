"""Which KV heads go from which rank of one node to which rank of another. Pure.

    4 heads, 2 source ranks, 3 target ranks      replicas: 1 head, 2 source ranks, 3 target ranks

    source   |  0   1  |  2   3  |               source   | 0 |  | 0 |
                 │   ╲     │   │                            │ ╲    │
    target   |  0   1  |  2  |  3  |             target   | 0 |  | 0 |  | 0 |
              1 piece   1     1                            from 0, from 1, from 0

A page is one allocation on every rank, each with its own heads of it. A write of pages is therefore
one *piece* for each pair of ranks that have heads in common. Ranks that hold equal ranges are
replicas: every target replica gets the heads, and the source replicas take turns in sending them,
so that each uses its own network interface.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RANKS = 64
"""More than any node has; what a peer says is checked against it."""


@dataclass(frozen=True, slots=True, order=True)
class HeadRange:
    """KV heads `first`, ..., `first + count - 1`, in the whole model's numbering."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def common(self, other: "HeadRange") -> "HeadRange | None":
        """The heads of both; None if there are none."""
        first, end = max(self.first, other.first), min(self.end, other.end)
        return HeadRange(first, end - first) if first < end else None


@dataclass(frozen=True, slots=True)
class Piece:
    """`heads` of each page, from a source rank to a target rank."""

    source: int
    target: int
    heads: HeadRange


def cut(sources: Sequence[HeadRange], targets: Sequence[HeadRange]) -> tuple[Piece, ...]:
    """The pieces of every write, in the order of target ranks and heads.

    Both are the ranges of a node's ranks, without a `ranges_problem`. Each head of each target rank
    is in exactly one piece, from a rank that has it, and a pair of ranks has at most one.
    """
    replicas: dict[HeadRange, list[int]] = {}
    for rank, heads in enumerate(sources):
        replicas.setdefault(heads, []).append(rank)
    turns: Counter[HeadRange] = Counter()
    pieces = []
    for target, wanted in enumerate(targets):
        for held, ranks in sorted(replicas.items()):
            common = held.common(wanted)
            if common is not None:
                pieces.append(Piece(ranks[turns[held] % len(ranks)], target, common))
                turns[held] += 1
    return tuple(pieces)


def ranges_problem(ranges: Sequence[HeadRange], num_kv_heads: int) -> str | None:
    """Why these cannot be what a node's ranks hold of a model's KV heads; None if they can.

    They can if any two are equal or have no head in common, and together they are all heads.
    """
    if not 1 <= len(ranges) <= MAX_RANKS:
        return f"{len(ranges)} ranks, not 1 to {MAX_RANKS}"
    end = 0
    for heads in sorted(set(ranges)):
        if heads.count < 1:
            return f"{heads.count} KV heads from {heads.first} on"
        if heads.first < end:
            return f"KV head {heads.first} is in ranges that are not equal, or negative"
        if heads.first > end:
            return f"no rank has KV head {end}"
        end = heads.end
    if end != num_kv_heads:
        return f"the ranks hold {end} KV heads, not {num_kv_heads}"
    return None
