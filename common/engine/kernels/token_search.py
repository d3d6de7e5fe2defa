"""What `sampling` is made of: passes over rows of logits, and searches for thresholds in them.

All work on several rows at a time: a number for each row is a tensor [rows], a pass takes tiles
[rows, BLOCK]. A row is read from the logits themselves or, where `listing`, from its short list,
which holds scaled logits already.
"""

import triton
import triton.language as tl

ONE = tl.constexpr(1 << 43)
"""The mass of the best token."""
LOWEST = tl.constexpr(-(1 << 31))
HIGHEST = tl.constexpr((1 << 31) - 1)
LARGEST = tl.constexpr(3.4e38)


@triton.jit
def finite(value):
    """What is no number, or infinite, becomes the largest: it wins, and its row still ends."""
    return tl.minimum(value, LARGEST)


@triton.jit
def scaled(logits, row, real, row_stride, temperature, offsets, size):
    """Logits at `offsets` [1, BLOCK] divided by the temperature as the CPU divides; -inf beyond."""
    inside = real[:, None] & (offsets < size)
    place = logits + row[:, None] * row_stride + offsets
    value = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    return finite(tl.div_rn(value, tl.broadcast_to(temperature[:, None], value.shape)))


@triton.jit
def _read(
    logits, listed, row, real, row_stride, capacity, temperature, listing, offsets, size,
):  # fmt: skip
    """(scaled logits, which of them exist) of tiles of logits or of short lists."""
    inside = real[:, None] & (offsets < size[:, None])
    from_list = inside & listing[:, None]
    short = tl.load(listed + row[:, None] * capacity + offsets, mask=from_list, other=0.0)
    whole = tl.load(
        logits + row[:, None] * row_stride + offsets, mask=inside & ~listing[:, None], other=0.0
    )
    divided = tl.div_rn(whole.to(tl.float32), tl.broadcast_to(temperature[:, None], whole.shape))
    return tl.where(listing[:, None], short, finite(divided)), inside


@triton.jit
def key_of(value):
    """Integers in the order of the floats; both zeros are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The float of a key."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mass_of(value, best):
    """exp(value - best) in multiples of 1 / ONE, as int64."""
    return (tl.exp(tl.where(value < best, value - best, 0.0)) * ONE).to(tl.int64)


@triton.jit
def pack(
    logits, listed, ids, row, real, row_stride, capacity, temperature, best, cutoff, floor, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """List what is not below `cutoff`, in the order of ids and as far as there is room.

    Gives (how many there are, their mass, the mass of what is not below `floor`) of each row.
    """
    count = (row * 0).to(tl.int32)
    near_mass = row * 0
    floor_mass = row * 0
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)[None, :]
        inside = real[:, None] & (offsets < vocab)
        value = scaled(logits, row, real, row_stride, temperature, offsets, vocab)
        mass = tl.where(inside, mass_of(value, best[:, None]), 0)
        floor_mass += tl.sum(tl.where(value >= floor[:, None], mass, 0), axis=1)
        near = inside & (value >= cutoff[:, None])
        place = count[:, None] + tl.cumsum(near.to(tl.int32), axis=1) - 1
        fits = near & (place < capacity)
        target = row[:, None] * capacity + place
        tl.store(listed + target, value, mask=fits)
        tl.store(ids + target, tl.broadcast_to(offsets, fits.shape), mask=fits)
        count += tl.sum(near.to(tl.int32), axis=1)
        near_mass += tl.sum(tl.where(near, mass, 0), axis=1)
    # Threads are about to read what others of this program wrote.
    tl.debug_barrier()
    return count, near_mass, floor_mass


@triton.jit
def largest_key(
    logits, listed, row, real, row_stride, capacity, temperature, best, target, listing, size,
    limit, COUNTING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key such that what is not below it counts, or weighs, at least `target`.

    Rows with a `target` of 0 take no part. Every turn raises `low`, which is enough, or lowers
    `high`, above which is too little, to a key that exists; they meet at the answer.
    """
    high = key_of(best)
    low = tl.where(target > 0, LOWEST, high)
    while tl.max((low < high).to(tl.int32)) > 0:
        # Never overflows, and is above `low`.
        pivot = (low >> 1) + (high >> 1) + ((low | high) & 1)
        found = row * 0
        next_above = low * 0 + HIGHEST
        next_below = low * 0 + LOWEST
        for start in range(0, limit, BLOCK):
            offsets = start + tl.arange(0, BLOCK)[None, :]
            value, inside = _read(
                logits, listed, row, real, row_stride, capacity, temperature, listing, offsets, size
            )
            key = key_of(value)
            upper = inside & (key >= pivot[:, None])
            if COUNTING:
                found += tl.sum(upper.to(tl.int64), axis=1)
            else:
                found += tl.sum(tl.where(upper, mass_of(value, best[:, None]), 0), axis=1)
            next_above = tl.minimum(next_above, tl.min(tl.where(upper, key, HIGHEST), axis=1))
            lower = tl.where(inside & ~upper, key, LOWEST)
            next_below = tl.maximum(next_below, tl.max(lower, axis=1))
        open_ = low < high
        enough = found >= target
        low = tl.where(open_ & enough, next_above, low)
        high = tl.where(open_ & ~enough, next_below, high)
    return high


@triton.jit
def above(
    logits, listed, row, real, row_stride, capacity, temperature, best, key, listing, size, limit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(how many, their mass) of what is above `key`."""
    count = row * 0
    mass = row * 0
    for start in range(0, limit, BLOCK):
        offsets = start + tl.arange(0, BLOCK)[None, :]
        value, inside = _read(
            logits, listed, row, real, row_stride, capacity, temperature, listing, offsets, size
        )
        upper = inside & (key_of(value) > key[:, None])
        count += tl.sum(upper.to(tl.int64), axis=1)
        mass += tl.sum(tl.where(upper, mass_of(value, best[:, None]), 0), axis=1)
    return count, mass


@triton.jit
def nth_equal(
    logits, listed, row, real, row_stride, capacity, temperature, key, nth, listing, size, limit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Where the `nth` (from 0) entry with exactly this key stands."""
    seen = row * 0
    place = row * 0
    for start in range(0, limit, BLOCK):
        offsets = start + tl.arange(0, BLOCK)[None, :]
        value, inside = _read(
            logits, listed, row, real, row_stride, capacity, temperature, listing, offsets, size
        )
        equal = (inside & (key_of(value) == key[:, None])).to(tl.int64)
        rank = seen[:, None] + tl.cumsum(equal, axis=1) - 1
        wanted = (equal > 0) & (rank == nth[:, None])
        place += tl.sum(tl.where(wanted, offsets, 0), axis=1)
        seen += tl.sum(equal, axis=1)
    return place


@triton.jit
def in_order(
    logits, row, real, row_stride, temperature, best, floor, number, vocab, BLOCK: tl.constexpr
):
    """The token at quantile `number` (of 2^64) of what is not below `floor`, in order of ids."""
    total = row * 0
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)[None, :]
        value = scaled(logits, row, real, row_stride, temperature, offsets, vocab)
        kept = (offsets < vocab) & (value >= floor[:, None])
        total += tl.sum(tl.where(kept, mass_of(value, best[:, None]), 0), axis=1)
    goal = tl.umulhi(number, total.to(tl.uint64)).to(tl.int64)
    token = row * 0
    before = row * 0
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)[None, :]
        value = scaled(logits, row, real, row_stride, temperature, offsets, vocab)
        kept = (offsets < vocab) & (value >= floor[:, None])
        mass = tl.where(kept, mass_of(value, best[:, None]), 0)
        passed = before[:, None] + tl.cumsum(mass, axis=1)
        token += tl.sum(((offsets < vocab) & (passed <= goal[:, None])).to(tl.int64), axis=1)
        before += tl.sum(mass, axis=1)
    return token
