"""Drawing tokens from logits: greedy in two stages, or filtered and drawn without a full sort.

What the CPU's sampler keeps with top_k, min_p and top_p is always a beginning of the tokens in the
order of their logits, so nothing needs to be sorted: the last token kept is found by a search for
a threshold, and so is the token that is drawn, as the one at which the mass of all better ones
passes the uniform number. Each step of a search reads the row once, and narrows to logits that
exist, so it ends with one of them. Most of it happens in a short list: what lies within `NEAR` of
the best logit is packed in one pass, and the whole row is searched only where that is too little.

Masses are integers, multiples of 2^-43 of the best token's: sums do not depend on their order, and
a draw is the same in any batch and on any device, up to the rounding of `exp` in float32 (a few
1e-7 of the mass; the CPU sampler's own is 1e-7 where it looks for top_p). Where logits are exactly
equal, the token with the lower id comes first; the CPU's order among them is arbitrary. The uniform
number is `common.engine.philox`'s, all of its 53 bits.

The idea of thresholds instead of a sort is FlashInfer's, which draws by rejection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.engine.kernels.token_search import (
    above,
    finite,
    in_order,
    largest_key,
    mass_of,
    nth_equal,
    pack,
    scaled,
    value_of,
)
from common.engine.kernels.tuning import INTERPRETED

MODE, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, CHOICE, INDEX = range(8)
"""Columns of `parameters`: see `draw_tokens`."""
COLUMNS = 8
SKIP, GREEDY, DRAW = 0, 1, 2

MAX_VOCAB = 1 << 19
"""Above, the sum of masses could pass 2^62."""
CAPACITY = 8192
"""Entries of a row's short list; more of them are no shorter than the row."""
NEAR = tl.constexpr(12.0)
"""Logits further below the best have less than a 160,000th of its probability."""
BLOCK = 4096
SPLIT = 16384
"""Of a row, what one program of the first greedy stage reads."""
ROWS_INTERPRETED = 1024
"""numpy wants large arrays: there a program takes many rows."""


@triton.jit
def _best(logits, row, real, row_stride, temperature, vocab, BLOCK: tl.constexpr):
    """(largest logit, its lowest token id) of each row."""
    best = temperature * 0.0 + float("-inf")
    token = row * 0
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)[None, :]
        value = scaled(logits, row, real, row_stride, temperature, offsets, vocab)
        most, where = tl.max(value, axis=1, return_indices=True)
        better = most > best
        token = tl.where(better, start + where, token)
        best = tl.where(better, most, best)
    # Nothing but minus infinity: whatever is drawn, it is not looked for among what is no number.
    return tl.maximum(best, -3.4e38), token


@triton.jit
def _uniform(seed, choice, index):
    """`philox.uniform` times 2^64, exactly: its 53 bits are the upper ones."""
    low = 0xFFFFFFFF
    words = tl.philox_impl(
        (index & low).to(tl.uint32), ((index >> 32) & low).to(tl.uint32),
        (choice & low).to(tl.uint32), (choice & 0).to(tl.uint32),
        (seed & low).to(tl.uint32), ((seed >> 32) & low).to(tl.uint32), 10,
    )  # fmt: skip
    return (words[0].to(tl.uint64) << 32) | ((words[1] >> 11) << 11).to(tl.uint64)


@triton.jit
def _share(fraction, mass):
    """floor(fraction / 2^64 * mass)."""
    return tl.umulhi(fraction.to(tl.uint64), mass.to(tl.uint64)).to(tl.int64)


@triton.jit
def _kept_by_rank(
    logits, listed, row, real, row_stride, capacity, temperature, best, top_k, top_p, mass, listing,
    size, BLOCK: tl.constexpr,
):  # fmt: skip
    """What of `mass` top_k and then top_p leave."""
    limit = tl.max(size)
    if tl.max(top_k) > 0:
        key = largest_key(
            logits, listed, row, real, row_stride, capacity, temperature, best, top_k, listing,
            size, limit, True, BLOCK,
        )  # fmt: skip
        count, better = above(
            logits, listed, row, real, row_stride, capacity, temperature, best, key, listing, size,
            limit, BLOCK,
        )  # fmt: skip
        kept = better + (top_k - count) * mass_of(value_of(key), best)
        mass = tl.where(top_k > 0, tl.minimum(mass, kept), mass)
    if tl.max((top_p != 0).to(tl.int32)) > 0:
        # The fewest that weigh at least top_p's share: `top_p` is one less than it, so exactly.
        target = tl.where(top_p != 0, _share(top_p, mass) + 1, 0)
        key = largest_key(
            logits, listed, row, real, row_stride, capacity, temperature, best, target, listing,
            size, limit, False, BLOCK,
        )  # fmt: skip
        _, better = above(
            logits, listed, row, real, row_stride, capacity, temperature, best, key, listing, size,
            limit, BLOCK,
        )  # fmt: skip
        each = tl.maximum(mass_of(value_of(key), best), 1)
        kept = better + (target - better + each - 1) // each * each
        mass = tl.where(top_p != 0, tl.minimum(mass, kept), mass)
    return mass


@triton.jit
def _draw_by_rank(
    logits, listed, ids, row, real, row_stride, capacity, vocab, temperature, best, top_k, top_p,
    floor, number, ranked, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token at quantile `number` in the order of logits, for the rows that are `ranked`."""
    cutoff = tl.where(ranked, best - NEAR, float("inf"))
    count, near, mass = pack(
        logits, listed, ids, row, real, row_stride, capacity, temperature, best, cutoff, floor,
        vocab, BLOCK,
    )  # fmt: skip
    enough = tl.where(top_k > 0, count >= top_k, _share(top_p, mass) < near)
    listing = (count <= capacity) & enough
    size = tl.where(ranked, tl.where(listing, count, vocab), 0)
    mass = _kept_by_rank(
        logits, listed, row, real, row_stride, capacity, temperature, best, top_k, top_p, mass,
        listing, size, BLOCK,
    )  # fmt: skip
    goal = _share(number, mass)
    limit = tl.max(size)
    key = largest_key(
        logits, listed, row, real, row_stride, capacity, temperature, best,
        tl.where(ranked, goal + 1, 0), listing, size, limit, False, BLOCK,
    )  # fmt: skip
    _, better = above(
        logits, listed, row, real, row_stride, capacity, temperature, best, key, listing, size,
        limit, BLOCK,
    )  # fmt: skip
    nth = (goal - better) // tl.maximum(mass_of(value_of(key), best), 1)
    place = nth_equal(
        logits, listed, row, real, row_stride, capacity, temperature, key, nth, listing, size,
        limit, BLOCK,
    )  # fmt: skip
    named = tl.load(ids + row * capacity + place, mask=real & ranked & listing, other=0)
    return tl.where(listing, named, place)


# One compilation, which takes ten seconds, for any number of rows.
@triton.jit(do_not_specialize=["num_rows"])
def _draw_kernel(
    logits, parameters, tokens, listed, ids, num_rows, vocab, row_stride, capacity,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    of_row = parameters + row * 8  # columns as numbers: see above
    mode = tl.load(of_row, mask=real, other=0)
    if tl.max(mode) > 0:
        drawing = mode == 2
        real = real & (mode > 0)
        heat = tl.load(of_row + 1, mask=real, other=0).to(tl.int32).to(tl.float32, bitcast=True)
        temperature = tl.where(drawing, heat, 1.0)
        best, token = _best(logits, row, real, row_stride, temperature, vocab, BLOCK)
        if tl.max(mode) > 1:
            top_k = tl.load(of_row + 2, mask=drawing, other=0)
            top_k = tl.where(top_k < vocab, top_k, 0)
            top_p = tl.load(of_row + 3, mask=drawing, other=0)
            least = tl.load(of_row + 4, mask=drawing, other=0).to(tl.int32)
            floor = best + least.to(tl.float32, bitcast=True)
            seed = tl.load(of_row + 5, mask=drawing, other=0)
            choice = tl.load(of_row + 6, mask=drawing, other=0)
            number = _uniform(seed, choice, tl.load(of_row + 7, mask=drawing, other=0))
            ranked = drawing & ((top_k > 0) | (top_p != 0))
            if tl.max(ranked.to(tl.int32)) > 0:
                drawn = _draw_by_rank(
                    logits, listed, ids, row, real, row_stride, capacity, vocab, temperature,
                    best, top_k, top_p, floor, number, ranked, BLOCK,
                )  # fmt: skip
                token = tl.where(ranked, drawn.to(tl.int64), token)
            if tl.max((drawing & ~ranked).to(tl.int32)) > 0:
                drawn = in_order(
                    logits, row, real, row_stride, temperature, best, floor, number, vocab, BLOCK
                )
                token = tl.where(drawing & ~ranked, drawn, token)
        # Logits that are not finite draw something, but never outside the vocabulary.
        token = tl.minimum(tl.maximum(token, 0), vocab - 1)
        tl.store(tokens + row, token, mask=real)


@triton.jit
def _split_argmax_kernel(
    logits, values, places, vocab, row_stride, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    most = float("-inf")
    place = split * SPLIT
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, vocab), BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < vocab
        value = tl.load(logits + row * row_stride + offsets, mask=inside, other=float("-inf"))
        best, where = tl.max(finite(value.to(tl.float32)), axis=0, return_indices=True)
        place = tl.where(best > most, start + where, place)
        most = tl.maximum(most, best)
    index = row * tl.num_programs(1) + split
    tl.store(values + index, most)
    tl.store(places + index, place)


@triton.jit
def _join_argmax_kernel(values, places, tokens, splits, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    inside = split < splits
    value = tl.load(values + row * splits + split, mask=inside, other=float("-inf"))
    _, best = tl.max(value, axis=0, return_indices=True)
    tl.store(tokens + row, tl.load(places + row * splits + best).to(tl.int64))


def argmax_tokens(
    logits: Tensor, *, out: Tensor | None = None, split: int = SPLIT, block: int = BLOCK
) -> Tensor:
    """The best token of each row of `logits` [rows, vocab_size], int64; of equals the first."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    splits = triton.cdiv(vocab, split)
    values = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    block = min(block, split, triton.next_power_of_2(vocab))
    _split_argmax_kernel[(rows, splits)](
        logits, values, places, vocab, logits.stride(0), SPLIT=split, BLOCK=block, num_warps=8
    )
    _join_argmax_kernel[(rows,)](
        values, places, out, splits, SPLITS=triton.next_power_of_2(splits), num_warps=1
    )
    return out


def draw_tokens(
    logits: Tensor,
    parameters: Tensor,
    *,
    out: Tensor | None = None,
    capacity: int = CAPACITY,
    block: int = BLOCK,
    rows_a_program: int = ROWS_INTERPRETED if INTERPRETED else 1,
) -> Tensor:
    """One token a row of `logits` [rows, vocab_size], as [rows] int64, in one launch.

    `parameters` [rows, COLUMNS] int64 says how:

        MODE         SKIP leaves the row's token as it is, GREEDY takes the best, DRAW draws
        TEMPERATURE  the bits of a positive float32
        TOP_K        0 keeps all
        TOP_P        2^64 times it, less one, as the bits of a uint64; 0 keeps all
        MIN_P        the bits of its logarithm in float32; minus infinity keeps all
        SEED, CHOICE, INDEX   as `philox.uniform` takes them, modulo 2^64

    Filters and order are `sampler.candidates`'; see the module for what rounding may change.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert vocab <= MAX_VOCAB, f"a vocabulary of {vocab} tokens is too large"
    assert parameters.shape == (rows, COLUMNS)
    assert parameters.is_contiguous()
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    capacity = min(capacity, vocab)
    listed = torch.empty((rows, capacity), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, capacity), dtype=torch.int32, device=logits.device)
    together = min(rows_a_program, triton.next_power_of_2(max(1, rows)))
    block = min(block, triton.next_power_of_2(vocab))
    _draw_kernel[(triton.cdiv(rows, together),)](
        logits, parameters, out, listed, ids, rows, vocab, logits.stride(0), capacity,
        ROWS=together, BLOCK=block, num_warps=16,
    )  # fmt: skip
    return out
