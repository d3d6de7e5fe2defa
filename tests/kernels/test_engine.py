"""Whole models over the kernels: the same greedy tokens as over the torch backend, which equal
transformers', on pages that are NaN where torch needs zeros."""

import pytest
import torch

from common.engine.attention.triton_backend import TritonAttention
from common.engine.kernels.tuning import AttentionTuning, DecodeConfig, PrefillConfig, StoreConfig
from common.kv_cache.storage import PagedKVCache
from tests.unit.engine.conftest import Zoo
from tests.unit.engine.driving import Engine, Generation, greedy

TUNING = AttentionTuning(
    prefill=PrefillConfig(block_rows=64, block_keys=32, num_warps=4, num_stages=2),
    decode=DecodeConfig(block_keys=32, num_warps=4, num_stages=2, min_keys=32, resident=2),
    store=StoreConfig(block_tokens=32),
    processors=4,
)
COUNT = 8
"""Tokens that are generated: each costs the interpreter about a third of a second."""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("zoo"))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (length,), generator=generator).tolist()


class PoisonedCache(PagedKVCache):
    """Unused pages are NaN, and so is what the runner asks to zero."""

    def clear(self, pages: torch.Tensor) -> None:
        self.tensor.index_fill_(0, pages, float("nan"))


def engine_over_kernels(monkeypatch: pytest.MonkeyPatch, zoo: Zoo, variant: str) -> Engine:
    class Small(TritonAttention):
        def __init__(
            self,
            cache: PagedKVCache,
            num_heads: int,
            windows: tuple[int | None, ...],
            dtype: torch.dtype,
        ) -> None:
            super().__init__(cache, num_heads, windows, dtype, TUNING)

    monkeypatch.setattr("common.engine.attention.choice.TorchAttention", Small)
    monkeypatch.setattr("tests.unit.engine.driving.PagedKVCache", PoisonedCache)
    engine = Engine(zoo.loaded(variant), num_pages=64, max_len=128)
    engine.cache.tensor.fill_(float("nan"))
    monkeypatch.undo()
    return engine


@pytest.mark.parametrize("variant", ["llama", "smollm2", "mistral", "qwen2-sliding", "qwen3"])
def test_chunks_and_decode(monkeypatch: pytest.MonkeyPatch, zoo: Zoo, variant: str) -> None:
    over_kernels = engine_over_kernels(monkeypatch, zoo, variant)
    want = Engine(zoo.loaded(variant)).generate(prompt(45), greedy(COUNT), chunk=17).outputs
    assert want == zoo.greedy(variant, prompt(45), COUNT)
    assert over_kernels.generate(prompt(45), greedy(COUNT), chunk=17).outputs == want


def mixed(engine: Engine) -> list[Generation]:
    """A request begins behind pages of another, beside decode rows of unequal lengths."""
    prefix = prompt(20)
    owner = engine.start(0, prefix + prompt(9, 1), greedy(COUNT))
    short = engine.start(1, prompt(2, 2), greedy(COUNT))
    engine.step((owner, 29), (short, 2))
    reader = engine.start(2, prefix + prompt(7, 3), greedy(COUNT))
    reader.pages, reader.computed = owner.pages[:5], 20
    engine.step((short, 1), (reader, 4), (owner, 1))
    engine.step((reader, 3), (owner, 1), (short, 1))
    generations = [owner, short, reader]
    while running := [g for g in generations if len(g.outputs) < COUNT]:
        engine.step(*((generation, 1) for generation in running))
    return generations


def test_mixed_batches_and_shared_prefix_pages(monkeypatch: pytest.MonkeyPatch, zoo: Zoo) -> None:
    for generation in mixed(engine_over_kernels(monkeypatch, zoo, "llama")):
        assert generation.outputs == zoo.greedy("llama", generation.prompt, COUNT)


def test_torch_attention_would_be_noticed(monkeypatch: pytest.MonkeyPatch, zoo: Zoo) -> None:
    """On the same poisoned pages it gives nonsense, so what passed above ran over the kernels."""
    monkeypatch.setattr("tests.unit.engine.driving.PagedKVCache", PoisonedCache)
    engine = Engine(zoo.loaded("llama"), num_pages=64, max_len=128)
    engine.cache.tensor.fill_(float("nan"))
    outputs = [generation.outputs for generation in mixed(engine)]
    want = [zoo.greedy("llama", g.prompt, COUNT) for g in mixed(Engine(zoo.loaded("llama")))]
    assert outputs != want
