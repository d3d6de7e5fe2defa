"""Single tokens over paged sequences equal float64 attention, however their keys are split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.attention.work import PlacedSpans, Split, Work, pad, split_singles
from common.engine.kernels.decode_attention import decode_attention
from common.engine.kernels.merging import Workspace
from common.engine.kernels.tuning import DecodeConfig
from tests.kernels.paged_scene import Scene, Shape
from tests.kernels.precision import DEVICE, DTYPES, assert_close, poisoned
from tests.kernels.shapes import FLOAT32, lengths, shapes, windows

CONFIGS = [DecodeConfig(16, 4, 2, 16, 2), DecodeConfig(32, 4, 3, 32, 2)]


def run(scene: Scene, work: Work, rows: int, config: DecodeConfig) -> torch.Tensor:
    shape = scene.shape
    workspace = Workspace.empty(
        len(work.entries) + 1, shape.num_heads, shape.head_dim, torch.device(DEVICE)
    )
    workspace.averages.fill_(float("nan"))
    workspace.logarithms.fill_(float("nan"))
    out = poisoned(rows, shape.num_heads * shape.head_dim, dtype=shape.dtype)
    decode_attention(
        scene.queries(rows),
        scene.layer,
        scene.page_table,
        torch.from_numpy(work.entries).to(DEVICE),
        torch.from_numpy(work.merges).to(DEVICE) if work.is_split else None,
        out=out,
        workspace=workspace,
        config=config,
    )
    return out


def check(
    shape: Shape,
    contexts: list[int],
    window: int | None,
    programs: int,
    config: DecodeConfig = CONFIGS[0],
) -> Work:
    """The last token of each of `contexts`; rows in reverse order, one of nobody between two."""
    scene = Scene(shape, contexts)
    count = len(contexts)
    spans = PlacedSpans.of([(slot, context - 1, 1) for slot, context in enumerate(contexts)])
    spans.rows[:] = [2 * (count - 1 - slot) for slot in range(count)]
    for slot, context in enumerate(contexts):
        if window is not None:
            for position in range(context - window):
                page = int(scene.page_table[slot, position // shape.page_size])
                scene.layer[page, :, :, position % shape.page_size] = float("nan")
    work = split_singles(spans, window, Split(programs, config.min_keys, config.block_keys))
    rows = 2 * count
    out = run(scene, work, rows, config)
    query = scene.queries(rows)
    for slot, context in enumerate(contexts):
        row = int(spans.rows[slot])
        wanted = scene.attention(query[row : row + 1], slot, context - 1, window)
        assert_close("attention", out[row : row + 1], wanted)
    assert out[1::2].isnan().all(), "a row of nobody was written"
    return work


@settings(max_examples=25, deadline=None)
@given(
    shapes(),
    st.lists(lengths, min_size=1, max_size=4),
    windows,
    st.integers(1, 9),
    st.sampled_from(CONFIGS),
)
def test_ragged_sequences(
    shape: Shape, contexts: list[int], window: int | None, programs: int, config: DecodeConfig
) -> None:
    check(shape, contexts, window, programs, config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_head_dims_of_real_models(dtype: torch.dtype, head_dim: int) -> None:
    work = check(Shape(2, 1, head_dim, 16, dtype), [50, 1], None, 3)
    assert work.is_split


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 16, 20])
def test_groups_of_query_heads(group: int) -> None:
    """Also more than the 16 rows of one product."""
    check(Shape(2 * group, 2, 16, 4, torch.float32), [37, 5], None, 4)


def test_one_sequence_much_longer_than_the_others() -> None:
    """It is read by many programs, and more pieces are merged than one pass of the merge takes."""
    work = check(FLOAT32, [600, 1, 3, 16, 17], None, 64)
    assert work.merges[:, 2].max() > 20
    assert work.merges[1:, 2].max() == 1 or work.merges[4, 2] <= 2


@pytest.mark.parametrize("rising", [True, False])
def test_pieces_of_different_magnitude_are_weighted(rising: bool) -> None:
    """Each piece's scores are higher (lower) than those before it, over several passes of the
    merge: what earlier passes summed fades, or later ones add little."""
    scene = Scene(FLOAT32, [320])
    size, keys = FLOAT32.page_size, scene.kv[0][0]
    ramp = torch.linspace(0.1, 4.0, 320, device=DEVICE)
    keys *= (ramp if rising else ramp.flip(0))[:, None]
    for number in range(320 // size):
        page = int(scene.page_table[0, number])
        scene.layer[page, 0] = keys[:, size * number : size * (number + 1)]
    work = split_singles(PlacedSpans.of([(0, 319, 1)]), None, Split(20, 16, 16))
    assert work.merges[0, 2] == 20
    out = run(scene, work, 1, CONFIGS[0])
    assert_close("attention", out, scene.attention(scene.queries(1), 0, 319, None))


@pytest.mark.parametrize("contexts", [[], [5], [70, 1, 20]])
def test_padding_reads_nothing_and_becomes_zero(contexts: list[int]) -> None:
    """As in a captured graph: rows without a sequence, and pieces without a row."""
    scene = Scene(FLOAT32, contexts or [1])
    spans = PlacedSpans.of([(slot, context - 1, 1) for slot, context in enumerate(contexts)])
    work = pad(split_singles(spans, None, Split(4, 16, 16)), 5, 9)
    out = run_padded(scene, work)
    query = scene.queries(5)
    for slot, context in enumerate(contexts):
        wanted = scene.attention(query[slot : slot + 1], slot, context - 1, None)
        assert_close("attention", out[slot : slot + 1], wanted)
    assert not out[len(contexts) :].any(), "padding is zero"


def run_padded(scene: Scene, work: Work) -> torch.Tensor:
    shape = scene.shape
    out = poisoned(len(work.merges), shape.num_heads * shape.head_dim, dtype=shape.dtype)
    decode_attention(
        scene.queries(len(work.merges)),
        scene.layer,
        scene.page_table,
        torch.from_numpy(work.entries).to(DEVICE),
        torch.from_numpy(work.merges).to(DEVICE),
        out=out,
        workspace=Workspace.empty(9, shape.num_heads, shape.head_dim, torch.device(DEVICE)),
        config=CONFIGS[0],
    )
    return out
