"""Which part of a model each rank of a node has. Pure.

As in Megatron-LM (Shoeybi et al., 2019) a layer is cut twice, each time first by output and then by
input, so that one sum over the ranks ends each half:

    query, key, value    rows    (the heads of a rank)     ─▶ attention ─▶ output  columns ─▶ sum
    gate, up             rows    (a range of the MLP)      ─▶ SiLU, mul ─▶ down    columns ─▶ sum
    head                 rows    (a range of the vocabulary)                              ─▶ gather

Norms, the embedding, and the biases of `output` and `down` (which rank 0 alone adds) are on every
rank.

**Heads** are cut between KV heads, so that the query heads of a rank share its KV heads evenly as
the whole model's do. Ranges need not be equal: SmolLM2's 9 heads over 3 KV heads are 6 and 3 on two
ranks. Where ranks outnumber the KV heads, each rank has one KV head, which its neighbours have too
(replicas), and the query heads of that KV head are divided among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from common.engine.errors import UnsupportedModelError
from common.engine.spec import ModelSpec

GRANULES = (64, 32, 16, 8, 4, 2, 1)
"""The MLP is cut at multiples of one of these, the largest that fits: products run best so."""

_ROWS = {"q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads", "gate_proj": "inner",
         "up_proj": "inner", "lm_head": "vocab"}  # fmt: skip
_COLUMNS = {"o_proj": "heads", "down_proj": "inner"}


@dataclass(frozen=True, slots=True)
class Cut:
    """Entries [first, last) of dimension `dim`, which has `whole` of them."""

    dim: int
    first: int
    last: int
    whole: int

    def shape_of_whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a tensor from which this cuts one of `shape`."""
        return tuple(self.whole if dim == self.dim else size for dim, size in enumerate(shape))

    @property
    def index(self) -> tuple[slice, ...]:
        """What picks the part from the whole."""
        return (*(slice(None),) * self.dim, slice(self.first, self.last))


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`. Ranges count in the whole model."""

    spec: ModelSpec
    rank: int
    size: int
    heads: range
    kv_heads: range
    inner: range
    """Of the MLP."""
    vocab: range
    """Of the logits that this rank makes; the last rank's may be shorter, or empty."""
    local: ModelSpec
    """The spec of what this rank computes; the whole model's but for heads and MLP."""

    @classmethod
    def of(cls, spec: ModelSpec, rank: int = 0, size: int = 1) -> "Shard":
        """Raises `UnsupportedModelError` where some rank would have nothing to do."""
        assert 0 <= rank < size, f"there is no rank {rank} of {size}"
        counts = {"attention heads": spec.num_heads, "rows of the MLP": spec.intermediate_size}
        for what, count in counts.items():
            if count < size:
                raise UnsupportedModelError(
                    f"tp: {count} {what} cannot be divided among {size} ranks"
                )
        heads, kv_heads = _heads(spec, rank, size)
        inner = _inner(spec.intermediate_size, rank, size)
        local = spec
        if size > 1:
            local = replace(
                spec,
                num_heads=len(heads),
                num_kv_heads=len(kv_heads),
                intermediate_size=len(inner),
            )
        # Equal pieces for all but the last: that is how they are gathered.
        piece = -(-spec.vocab_size // size)
        first = min(rank * piece, spec.vocab_size)
        vocab = range(first, min(first + piece, spec.vocab_size))
        return cls(spec, rank, size, heads, kv_heads, inner, vocab, local)

    def cut(self, name: str) -> Cut | None:
        """What this rank has of a weight or bias, by its name in a checkpoint; None for all of it.

        A name of an adapter's module will do as well, with `weight` behind it.
        """
        if self.size == 1:
            return None
        module, _, kind = name.rpartition(".")
        module = module.rpartition(".")[2]
        if module in _ROWS:
            return self._cut(0, _ROWS[module])
        if module in _COLUMNS and kind == "weight":
            return self._cut(1, _COLUMNS[module])
        return None

    def _cut(self, dim: int, what: str) -> Cut:
        spec = self.spec
        match what:
            case "heads":
                part, unit, whole = self.heads, spec.head_dim, spec.num_heads
            case "kv_heads":
                part, unit, whole = self.kv_heads, spec.head_dim, spec.num_kv_heads
            case "inner":
                part, unit, whole = self.inner, 1, spec.intermediate_size
            case _:
                part, unit, whole = self.vocab, 1, spec.vocab_size
        return Cut(dim, part.start * unit, part.stop * unit, whole * unit)


def divide(count: int, parts: int) -> list[range]:
    """[0, count) in consecutive ranges as even as possible, the longer ones first."""
    short, longer = divmod(count, parts)
    ends = [number * short + min(number, longer) for number in range(parts + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


def _heads(spec: ModelSpec, rank: int, size: int) -> tuple[range, range]:
    """Query heads and KV heads of a rank."""
    group = spec.num_heads // spec.num_kv_heads
    if size <= spec.num_kv_heads:
        kv_heads = divide(spec.num_kv_heads, size)[rank]
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    kv_head = rank * spec.num_kv_heads // size
    replicas = [r for r in range(size) if r * spec.num_kv_heads // size == kv_head]
    part = divide(group, len(replicas))[replicas.index(rank)]
    first = kv_head * group
    return range(first + part.start, first + part.stop), range(kv_head, kv_head + 1)


def _inner(count: int, rank: int, size: int) -> range:
    granule = next(g for g in GRANULES if count % g == 0 and count // g >= size)
    part = divide(count // granule, size)[rank]
    return range(part.start * granule, part.stop * granule)
