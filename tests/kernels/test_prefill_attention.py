"""Chunks over paged prefixes equal float64 attention, and nothing but what is seen is read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.engine.attention.work import PlacedSpans, Split, Work, tile_chunks
from common.engine.kernels.merging import Workspace
from common.engine.kernels.prefill_attention import prefill_attention
from common.engine.kernels.tuning import PrefillConfig
from tests.kernels.paged_scene import Scene, Shape
from tests.kernels.precision import DEVICE, DTYPES, assert_close, poisoned
from tests.kernels.shapes import FLOAT32, lengths, shapes, windows

WHOLE = Split(programs=1, min_keys=1 << 20, multiple=64)
"""Keys are not divided."""
CONFIGS = [PrefillConfig(16, 16, 4, 2), PrefillConfig(16, 32, 4, 2), PrefillConfig(64, 16, 4, 3)]


def run(
    scene: Scene,
    query: Tensor,
    work: Work,
    window: int | None,
    config: PrefillConfig,
    pool: Tensor | None = None,
) -> Tensor:
    """What a poisoned output holds afterwards."""
    shape = scene.shape
    workspace = Workspace.empty(
        work.num_places + 1, shape.num_heads, shape.head_dim, torch.device(DEVICE)
    )
    workspace.averages.fill_(float("nan"))
    workspace.logarithms.fill_(float("nan"))
    out = poisoned(len(query), shape.num_heads * shape.head_dim, dtype=shape.dtype)
    prefill_attention(
        query,
        scene.layer if pool is None else pool,
        scene.page_table,
        torch.from_numpy(work.entries).to(DEVICE),
        torch.from_numpy(work.merges).to(DEVICE) if work.is_split else None,
        out=out,
        workspace=workspace,
        window=window,
        config=config,
    )
    return out


def check(
    shape: Shape,
    chunks: list[tuple[int, int]],
    window: int | None,
    config: PrefillConfig,
    programs: int = 0,
    unseen_are_poison: bool = False,
) -> Work:
    """`chunks` are (prefix, new tokens). The last rows of the batch are nobody's. With `programs`
    tiles are divided among so many."""
    scene = Scene(shape, [prefix + new for prefix, new in chunks])
    spans = [(slot, prefix, new) for slot, (prefix, new) in enumerate(chunks)]
    placed = PlacedSpans.of(spans)
    rows = int(placed.lengths.sum())
    query = scene.queries(rows + 3)
    if unseen_are_poison and window is not None:
        for slot, prefix, _ in spans:
            gone = max(0, prefix - window + 1)
            for position in range(gone):
                page = int(scene.page_table[slot, position // shape.page_size])
                scene.layer[page, :, :, position % shape.page_size] = float("nan")
    tokens = config.tokens(shape.num_heads // shape.num_kv_heads)
    split = Split(programs, 16, config.block_keys) if programs else WHOLE
    work = tile_chunks(placed, tokens, window, split)
    out = run(scene, query, work, window, config)

    first = 0
    for slot, prefix, new in spans:
        wanted = scene.attention(query[first : first + new], slot, prefix, window)
        assert_close("attention", out[first : first + new], wanted)
        first += new
    assert out[rows:].isnan().all(), "a row of nobody was written"
    return work


@settings(max_examples=25, deadline=None)
@given(
    shapes(),
    st.lists(st.tuples(st.one_of(st.just(0), lengths), lengths), min_size=1, max_size=3),
    windows,
    st.sampled_from(CONFIGS),
    st.sampled_from([0, 0, 4, 12]),
)
def test_ragged_chunks(
    shape: Shape,
    chunks: list[tuple[int, int]],
    window: int | None,
    config: PrefillConfig,
    programs: int,
) -> None:
    check(shape, chunks, window, config, programs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_head_dims_of_real_models(dtype: torch.dtype, head_dim: int) -> None:
    check(Shape(2, 1, head_dim, 16, dtype), [(13, 9)], None, CONFIGS[1])


@pytest.mark.parametrize("prefix", [0, 1, 3, 4, 5, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("window", [None, 8])
def test_boundaries_of_pages_and_tiles(prefix: int, window: int | None) -> None:
    for new in (1, 16 - prefix % 16, 17):
        check(FLOAT32, [(prefix, new)], window, CONFIGS[0])


def test_a_prefix_much_longer_than_the_chunk() -> None:
    check(FLOAT32, [(333, 3), (0, 2)], None, CONFIGS[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
def test_keys_divided_among_programs(dtype: torch.dtype, window: int | None) -> None:
    """Also into parts of which a tile's first tokens see nothing: the diagonal is cut."""
    work = check(Shape(4, 2, 16, 4, dtype), [(100, 13), (9, 20)], window, CONFIGS[2], programs=8)
    assert work.merges[:, 2].max() >= 4
    assert len(work.merges) == 33


@pytest.mark.parametrize("window", [1, 4, 7, 16, 40])
def test_what_has_left_the_window_is_not_read(window: int) -> None:
    """It is NaN here, within pages whose other tokens are seen, and in whole ones."""
    check(FLOAT32, [(60, 21), (3, 30)], window, CONFIGS[0], unseen_are_poison=True)


def test_large_scores_do_not_overflow() -> None:
    """Products of 10^4: their exponentials would be infinite before the highest is subtracted."""
    scene = Scene(FLOAT32, [40])
    query = scene.queries(40) * 3000
    work = tile_chunks(PlacedSpans.of([(0, 0, 40)]), 8, None, WHOLE)
    out = run(scene, query, work, None, CONFIGS[0])
    assert_close("attention", out, scene.attention(query, 0, 0, None))


def test_a_pool_of_more_elements_than_32_bits_count() -> None:
    """Two pages, so far apart that the offset of the second needs 64 bits."""
    shape = Shape(2, 1, 16, 4, torch.float16)
    scene = Scene(shape, [7])
    near = scene.layer
    far = 1 << 30
    spread = torch.empty(2 * far + near[0].numel(), dtype=shape.dtype, device=DEVICE)
    pool = spread.as_strided((3, *near.shape[1:]), (far, *near[0].contiguous().stride()))
    pool[1:] = near[1:]
    query = scene.queries(7)
    work = tile_chunks(PlacedSpans.of([(0, 0, 7)]), 8, None, WHOLE)
    out = run(scene, query, work, None, CONFIGS[0], pool)
    assert_close("attention", out, scene.attention(query, 0, 0, None))
