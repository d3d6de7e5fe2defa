"""Philox4x32-10: random numbers that are a pure function of a key and a counter.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11). A draw needs
no state: whichever node, batch or attempt asks for (seed, choice, output index) gets the same one.
One block of plain integer arithmetic a token costs a few microseconds, far below a forward pass.
"""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """One block: four random 32-bit words. All inputs are 32-bit words."""
    a, b, c, d = counter
    key_low, key_high = key
    for _ in range(_ROUNDS):
        product_a = _MULTIPLIERS[0] * a
        product_c = _MULTIPLIERS[1] * c
        a, b = (product_c >> 32) ^ b ^ key_low, product_c & _MASK
        c, d = (product_a >> 32) ^ d ^ key_high, product_a & _MASK
        key_low = (key_low + _WEYL[0]) & _MASK
        key_high = (key_high + _WEYL[1]) & _MASK
    return a, b, c, d


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits for output token `index` of `choice`.

    `seed` may be any integer; its low 64 bits are the key.
    """
    counter = (index & _MASK, (index >> 32) & _MASK, choice & _MASK, 0)
    high, low, _, _ = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    return ((high << 21) | (low >> 11)) / (1 << 53)
