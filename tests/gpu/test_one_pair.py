"""A prefill and a decode node on one device, over NIXL, answer what the torch backend answers."""

import asyncio
import random
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_cells.parity import WORST_SHORTFALL, Answer, TorchOracle
from benchmarks.gpu_cells.scale import DRY as TINY_SCALE
from benchmarks.gpu_cells.scale import DRY_RATES, FULL, Setting
from benchmarks.gpu_cells.serving import RANDOM, Served, big_model, one_pair, small_model
from benchmarks.gpu_cells.stopwatch import ModelledStopwatch
from common.config import DEFAULT_MODEL
from tests.gpu.cases import DRY, sized
from tests.integration.client import client
from tests.tiny_models import VOCAB_SIZE

LENGTHS = sized([1, 15, 16, 17, 300, 1024], [1, 5])
COUNT = sized([48], [5])[0]
LONGEST = max(LENGTHS) + COUNT
POOLS: dict[str, object] = {} if DRY else {"num_pages": None, "mem_fraction": 0.2}
"""Sized by what a run of the largest batch leaves, which no other test on a GPU goes through."""


@pytest.fixture
def setting(device: torch.device, tmp_path: Path) -> Setting:
    return Setting(
        scale=TINY_SCALE if DRY else FULL,
        device=device,
        dtype=torch.bfloat16,
        stopwatch=ModelledStopwatch(DRY_RATES),  # nothing is timed here
        rates=None,
        scratch=str(tmp_path),
        model=RANDOM if DRY else DEFAULT_MODEL,
    )


def answers(setting: Setting, model: Served, dtype: str, **flags: object) -> list[Answer]:
    chance = random.Random(0)
    prompts = [[chance.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]

    async def ask(url: str) -> list[list[int]]:
        async with client(url) as session:
            asked = [session.tokens(prompt, COUNT) for prompt in prompts]
            outputs = await asyncio.gather(*asked)
            await session.wait_idle()
            return outputs

    with one_pair(setting, model, dtype=dtype, **flags) as running:
        outputs = asyncio.run(ask(running.url))
    return [Answer(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


@pytest.mark.timeout(400)
def test_the_small_model_s_greedy_tokens_are_the_torch_backend_s(setting: Setting) -> None:
    with small_model(setting) as model:
        served = answers(setting, model, "float32", **POOLS)
        oracle = TorchOracle(model.folder, "float32", setting.device, LONGEST)
        for answer in served:
            wanted = oracle.greedy(answer.prompt, COUNT)
            assert answer.output == wanted, f"after a prompt of {len(answer.prompt)} tokens"


@pytest.mark.twice
@pytest.mark.timeout(600)
def test_an_8b_shaped_model_serves_tokens_that_the_torch_backend_finds_best(
    setting: Setting,
) -> None:
    dtype = setting.scale.served_dtype
    with big_model(setting) as model:
        served = answers(setting, model, dtype)
        oracle = TorchOracle(model.folder, dtype, setting.device, LONGEST)
        worst = max(nats for answer in served for nats in oracle.shortfalls(answer))
    assert worst <= WORST_SHORTFALL
