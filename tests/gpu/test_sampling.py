"""Draws of a whole batch from real vocabularies equal the CPU sampler's, token for token."""

import random

import pytest
import torch

from common.engine.sampler import Draw, Sampler
from common.messages import SamplingParams
from common.plan import Sample, SlotInit
from tests.gpu.accuracy import BFLOAT16, FLOAT32
from tests.gpu.cases import sized

VOCABULARIES = sized([49_152, 128_256, 151_936], [300])
ROWS = sized([1, 64, 256], [6])
ROUNDED_OFF = 0.005
"""Of the draws, how many may differ from the CPU's (one at least): those whose uniform number is
within rounding, a few 1e-7, of where one token ends and the next begins, and those among tokens
with equal logits, which bfloat16 has many of and the CPU keeps in no order."""
TEMPERATURES, TOP_KS = (0.0, 0.3, 0.8, 1.0, 2.0), (0, 0, 1, 20, 200)
TOP_PS, MIN_PS = (1.0, 1.0, 0.1, 0.9, 0.99), (0.0, 0.0, 0.05)


def params(chance: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        seed=chance.getrandbits(63),
        temperature=chance.choice(TEMPERATURES),
        top_k=chance.choice(TOP_KS),
        top_p=chance.choice(TOP_PS),
        min_p=chance.choice(MIN_PS),
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_draws_equal_the_cpu_sampler_s(
    vocab: int, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    from common.engine.ops import choose_ops

    chance = random.Random(vocab + rows)
    generator = torch.Generator(device).manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=generator, device=device).mul_(4).to(dtype)
    there = Sampler(vocab, device, fused=choose_ops("triton").fused_draws(vocab))
    here = Sampler(vocab, torch.device("cpu"))
    draws = [Draw(slot, chance.randrange(5000)) for slot in range(rows)]
    for slot in range(rows):
        init = SlotInit(params(chance), [1], [])
        there.reset(slot, init)
        here.reset(slot, init)

    drawn = there.sample(logits, draws)
    wanted = here.sample(logits.cpu(), draws)

    host = logits.float().cpu()
    different = 0
    for row, (one, other) in enumerate(zip(drawn, wanted, strict=True)):
        assert isinstance(one, Sample)
        assert isinstance(other, Sample)
        assert 0 <= one.token_id < vocab
        different += bool(host[row, one.token_id] != host[row, other.token_id])
    assert different <= max(1, ROUNDED_OFF * rows), f"{different} of {rows} differ"


def test_the_best_of_equal_tokens_is_the_first(device: torch.device) -> None:
    from common.engine.kernels.sampling import argmax_tokens

    vocab = VOCABULARIES[-1]
    logits = torch.zeros(4, vocab, device=device)
    best = torch.tensor([0, 7, vocab // 2, vocab - 2], device=device)
    logits.scatter_(1, best[:, None], 3.0)
    logits[:, vocab - 1] = 3.0
    assert torch.equal(argmax_tokens(logits), best)
