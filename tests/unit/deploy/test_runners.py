"""Which decode steps are captured, by the flags."""

import pytest

from common.config import DecodeConfig
from common.engine.device import AttentionName
from deploy.flags import parse_flags
from deploy.runners import graph_sizes


@pytest.mark.parametrize(
    ("args", "attention", "sizes"),
    [
        ([], "triton", (1, 2, 4, 8, 16, 32, 64)),
        (["--max-running-requests", "12"], "triton", (1, 2, 4, 8, 12)),
        (["--cuda-graph-sizes", "8", "64"], "triton", (8, 64)),
        (["--no-cuda-graphs", "--cuda-graph-sizes", "8"], "triton", ()),
        ([], "torch", ()),
    ],
)
def test_sizes_of_captured_steps(
    args: list[str], attention: AttentionName, sizes: tuple[int, ...]
) -> None:
    config = parse_flags(DecodeConfig, "pdserve decode", args)
    assert graph_sizes(config, attention) == sizes
    assert config.overlap
