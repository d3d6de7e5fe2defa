"""A model that ranks share answers like transformers and PEFT, token for token."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine.loader import LoadedModel
from common.engine.lora.adapter import part_of
from common.engine.lora.pool import LoraPool
from common.engine.lora.reader import read_folder
from common.engine.parallel.shards import Shard
from tests.adapters import ADAPTERS
from tests.unit.engine.conftest import Zoo
from tests.unit.engine.driving import greedy
from tests.unit.engine.parallel.rig import GaveUp, shared
from tests.unit.engine.test_lora_greedy import Adapted, run_mixed
from tests.unit.engine.test_prompt_logprobs import TOLERANCE, oracle, scored

Prompt = Callable[..., list[int]]


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        ("llama", 2),
        ("llama-biases", 2),
        ("llama", 6),
        ("smollm2", 2),
        ("smollm2", 3),
        ("mistral", 4),
        ("qwen2", 5),
        ("qwen3", 3),
    ],
)
def test_greedy_equals_transformers(zoo: Zoo, prompt: Prompt, variant: str, size: int) -> None:
    """Even and uneven parts, fewer KV heads than ranks, tied and untied heads."""
    want = zoo.greedy(variant, prompt(53), 20)
    assert len(set(want)) > 5, "a constant output would prove nothing"
    with shared(zoo.folder(variant), size) as engine:
        for chunk in (11, 1000):
            generation = engine.generate(prompt(53), greedy(20), chunk=chunk)
            engine.release(generation)
            assert generation.outputs == want


def test_a_mixed_batch_whose_slots_change_owners(zoo: Zoo, prompt: Prompt) -> None:
    with shared(zoo.folder("llama"), 3) as engine:
        for turn in range(2):
            generations = [
                engine.start(slot, prompt(3 + 20 * slot, turn), greedy(8)) for slot in range(3)
            ]
            engine.step(*((g, min(9, len(g.prompt))) for g in generations))
            while any(len(g.outputs) < 8 for g in generations):
                left = [g for g in generations if len(g.outputs) < 8]
                engine.step(*((g, min(9, len(g.tokens) - g.computed)) for g in left))
            for generation in generations:
                assert generation.outputs == zoo.greedy("llama", generation.prompt, 8)
                engine.release(generation)


@pytest.mark.parametrize(("variant", "size"), [("llama-biases", 3), ("qwen3", 2)])
def test_adapters_equal_peft(
    zoo: Zoo, prompt: Prompt, tmp_path: Path, variant: str, size: int
) -> None:
    """The base model and adapters of every product, in one batch."""
    model = Adapted(zoo, variant, tmp_path)

    def make_pool(loaded: LoadedModel, rank: int, size: int) -> LoraPool:
        shard = Shard.of(loaded.spec, rank, size)
        pool = LoraPool(shard.local, torch.float32, len(ADAPTERS), 40)
        for slot, name in enumerate(ADAPTERS):
            adapter = read_folder(model.folders[name], loaded.spec, 256)
            pool.place(slot, part_of(adapter, shard, lambda: None), lambda: None)
        return pool

    names = [None, *ADAPTERS, "all-8"]
    work = [(name, prompt(9 + 4 * n, n), 10) for n, name in enumerate(names)]
    with shared(zoo.folder(variant), size, make_pool) as engine:
        assert run_mixed(engine, work) == [model.oracle.greedy(*each) for each in work]


def test_prompt_logprobs_equal_transformers(zoo: Zoo, prompt: Prompt) -> None:
    ids = prompt(90)
    want = oracle(zoo, "qwen3", ids)
    with shared(zoo.folder("qwen3"), 2) as engine:
        beside = engine.generate(prompt(9, 5), greedy(1), slot=1)
        found = scored(engine, engine.start(0, ids, greedy(4)), 70, 2, beside)
    assert len(found) == len(ids) - 1
    for position, score in enumerate(found):
        expected = float(want[position, ids[position + 1]])
        assert score.logprob == pytest.approx(expected, abs=TOLERANCE)


def test_a_pass_that_fails_anywhere_is_given_up(zoo: Zoo, prompt: Prompt) -> None:
    def fail_in_a_shared_model() -> None:
        with shared(zoo.folder("llama"), 2) as engine:
            engine.free.append(engine.cache.num_pages)
            engine.generate(prompt(9), greedy(1))

    with pytest.raises(GaveUp):
        fail_in_a_shared_model()
