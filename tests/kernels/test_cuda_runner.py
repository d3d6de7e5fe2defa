"""The whole GPU path under the interpreter: kernels, draws, adapters and graphs in the runner that
does not wait, against the runner of CPUs. Graphs run their work anew; what is captured and what is
refilled before each replay is as on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.attention.base import AttentionBackend
from common.engine.attention.triton_backend import TritonAttention
from common.engine.loader import LoadedModel, load_model
from common.engine.lora.pool import LoraPool
from common.engine.ops import choose_ops
from common.messages import SamplingParams
from tests.kernels.precision import DEVICE
from tests.kernels.test_ops import random_adapter
from tests.late_stream import LateStream
from tests.tiny_models import make_tiny_model
from tests.unit.engine.cuda.driving import LateEngine
from tests.unit.engine.driving import Engine, greedy

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the loader's models are on the CPU here")

STEPS = 4


class TritonEngine(LateEngine):
    def attention(self, loaded: LoadedModel) -> AttentionBackend[Any]:
        spec = loaded.model.spec
        return TritonAttention(self.cache, spec.num_heads, spec.windows)


def pool_of(model: LoadedModel) -> LoraPool:
    pool = LoraPool(model.spec, torch.float32, 3, 16)
    for slot, rank in ((2, 4), (0, 11)):
        pool.place(slot, random_adapter(model, rank, slot), lambda: None)
    return pool


@pytest.mark.parametrize("adapted", [False, True])
def test_tokens_equal_the_cpu_runners(tmp_path: Path, adapted: bool) -> None:
    make_tiny_model("llama", tmp_path / "m", seed=3)
    plain = load_model(tmp_path / "m", "float32")
    kernels = load_model(tmp_path / "m", "float32", ops=choose_ops("triton"))
    wishes = [
        greedy(),
        SamplingParams(max_tokens=9, seed=4, temperature=0.8, top_p=0.9),
        SamplingParams(max_tokens=9, seed=5, top_k=7, min_p=0.02),
    ]
    lora_slots = [2, None, 0] if adapted else [None] * 3
    texts = []
    late = TritonEngine(
        kernels,
        sizes=(4,),
        num_pages=40,
        max_len=64,
        lora=pool_of(kernels) if adapted else None,
        stream=LateStream(records=False),
    )
    for engine in (late, Engine(plain, lora=pool_of(plain) if adapted else None)):
        generations = [
            engine.start(slot, list(range(5 + slot, 12 + 2 * slot)), wish, lora_slots[slot])
            for slot, wish in enumerate(wishes)
        ]
        step = late.ahead if engine is late else engine.step
        step(*((generation, len(generation.prompt)) for generation in generations))
        for _ in range(STEPS):
            step(*((generation, 1) for generation in generations))
        late.settle()
        texts.append([generation.outputs for generation in generations])
    assert texts[0] == texts[1]
    assert sum(graph.replays for graph in late.stream.graphs) == STEPS
