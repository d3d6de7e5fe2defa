"""What hypothesis draws attention's shapes from: small, and with every kind of edge."""

import torch
from hypothesis import strategies as st

from tests.kernels.paged_scene import Shape
from tests.kernels.precision import DTYPES

HEADS = [(2, 2), (4, 2), (3, 1), (8, 2), (5, 1), (8, 1)]
"""(query heads, KV heads): 1:1 to 8:1, powers of two and others."""
HEAD_DIMS = [16, 32, 8, 24, 40]
PAGE_SIZES = [4, 8, 16, 64, 6, 1]
"""Smaller and larger than a tile of keys, and such that divide none."""
WINDOWS = [None, None, 1, 5, 16, 33]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    num_heads, num_kv_heads = draw(st.sampled_from(HEADS))
    return Shape(
        num_heads,
        num_kv_heads,
        draw(st.sampled_from(HEAD_DIMS)),
        draw(st.sampled_from(PAGE_SIZES)),
        draw(st.sampled_from(DTYPES)),
    )


windows: st.SearchStrategy[int | None] = st.sampled_from(WINDOWS)

lengths = st.one_of(st.integers(1, 6), st.integers(1, 70), st.sampled_from([15, 16, 17, 32, 64]))
"""Tokens of a prefix, a chunk or a sequence: around pages and tiles, and anything."""

FLOAT32 = Shape(4, 2, 16, 4, torch.float32)
