"""NIXL between two processes' pools on one device: every byte lands where it belongs."""

import random

import pytest
import torch

from benchmarks.gpu_cells.two_pools import PoolShape, TwoPools, digest
from tests.gpu.cases import LLAMA_8B, TINY, sized

NUM_PAGES, WRITES = sized([(256, (1, 7, 64, 128))], [(12, (1, 5))])[0]
SHAPE = sized([LLAMA_8B], [TINY])[0]
LAYERS = 4


@pytest.mark.timeout(240)
def test_pages_land_in_the_memory_of_another_process(device: torch.device) -> None:
    shape = PoolShape(
        num_pages=NUM_PAGES,
        num_layers=LAYERS,
        num_kv_heads=SHAPE.num_kv_heads,
        page_size=SHAPE.page_size,
        head_dim=SHAPE.head_dim,
        dtype=torch.bfloat16,
        device=str(device),
    )
    chance = random.Random(0)
    free = chance.sample(range(NUM_PAGES), NUM_PAGES)
    with TwoPools(shape) as pools:
        untouched = pools.landed(free)
        for count in WRITES:
            source, target = chance.sample(range(NUM_PAGES), count), free[:count]
            del free[:count]
            pools.write(source, target)
            assert pools.landed(target) == digest(pools.cache, source), f"{count} pages"
        assert pools.landed(free) == digest_of_zeros(pools, len(free)), "others were touched"
        assert untouched == digest_of_zeros(pools, NUM_PAGES)


def digest_of_zeros(pools: TwoPools, num_pages: int) -> str:
    """What pages of the receiver hold before anything is written."""
    cache = pools.cache
    kept = cache.tensor[:1].clone()
    cache.tensor[:1].zero_()
    found = digest(cache, [0] * num_pages)
    cache.tensor[:1] = kept
    return found
