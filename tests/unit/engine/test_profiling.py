"""The batch that is profiled is one that a runner can run, and no real one is larger."""

import pytest

from common.engine.profiling import PROFILED_PAGES, largest_batch
from tests.unit.engine.conftest import Zoo
from tests.unit.engine.driving import Engine


@pytest.mark.parametrize(
    ("chunk", "slots", "length", "tokens"),
    [
        (40, 8, 256, 47),
        (100, 3, 64, 101),  # a chunk does not fit into one context
        (5, 8, 256, 12),
        (300, 2, 64, 128),  # nor into all of them
        (1, 1, 8, 1),
    ],
)
def test_every_slot_computes_at_the_end_of_the_longest_context(
    chunk: int, slots: int, length: int, tokens: int
) -> None:
    batch = largest_batch(
        chunk_size=chunk, max_running_requests=slots, max_model_len=length, page_size=4
    )
    assert batch.num_tokens == tokens
    assert [row.slot for row in batch.rows] == list(range(slots))
    assert all(row.sample_index is not None and row.init is not None for row in batch.rows)
    for row in batch.rows:
        assert row.start + len(row.token_ids) == length
        assert len(row.new_pages) == -(-length // 4)
        assert max(row.new_pages) < PROFILED_PAGES
    assert [row.prompt_logprobs is not None for row in batch.rows] == [True] + [False] * (slots - 1)


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3"])
def test_a_runner_runs_it_over_a_pool_of_a_page(zoo: Zoo, variant: str) -> None:
    engine = Engine(zoo.loaded(variant), num_pages=PROFILED_PAGES, max_len=96)
    batch = largest_batch(chunk_size=30, max_running_requests=8, max_model_len=96, page_size=4)
    result = engine.runner.launch(batch).result()
    assert all(result.samples)
    assert len(result.prompt_logprobs[0]) == 30
    assert engine.cache.tensor.isfinite().all()
    assert engine.cache.tensor.any()
