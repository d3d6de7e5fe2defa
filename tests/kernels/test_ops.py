"""A whole model with kernels for all but attention and products, against the same in torch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.engine.loader import LoadedModel, load_model
from common.engine.lora.adapter import Factors, LoraAdapter
from common.engine.lora.pool import LoraPool
from common.engine.lora.targets import targets_of
from common.engine.ops import choose_ops
from common.engine.sampler import Draw, Sampler, SlotSampling
from common.messages import SamplingParams
from common.plan import Sample, SlotInit
from tests.kernels.precision import DEVICE
from tests.tiny_models import make_tiny_model
from tests.unit.engine.driving import Engine, Generation, greedy

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the loader's models are on the CPU here")

Models = dict[str, tuple[LoadedModel, LoadedModel]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """By kind: the model with torch's ops, and with Triton's."""
    found: Models = {}
    for kind in ("llama", "qwen3"):
        folder = tmp_path_factory.mktemp("models") / kind
        make_tiny_model(kind, folder, seed=3)
        torch_model = load_model(folder, "float32", ops=choose_ops("torch"))
        found[kind] = torch_model, load_model(folder, "float32", ops=choose_ops("triton"))
    return found


def random_adapter(model: LoadedModel, rank: int, seed: int) -> LoraAdapter:
    """Large enough that tokens change."""
    generator = torch.Generator().manual_seed(seed)

    def factors(in_features: int, out_features: int) -> Factors:
        shrink = torch.randn(rank, in_features, generator=generator)
        expand = torch.randn(out_features, rank, generator=generator)
        return Factors(shrink, expand, 0.2 / rank**0.5)

    layer = {t.module: factors(t.in_features, t.out_features) for t in targets_of(model.spec)}
    return LoraAdapter((layer,) * model.spec.num_layers, rank, "")


def answers(model: LoadedModel, sampling: list[SamplingParams], adapted: bool) -> list[list[int]]:
    """One batch of prompts, the first two of which have an adapter: a chunk each, then decode."""
    pool = LoraPool(model.spec, torch.float32, 3, 16)
    if adapted:
        for slot, rank in ((2, 4), (0, 11)):
            pool.place(slot, random_adapter(model, rank, slot), lambda: None)
    engine = Engine(model, lora=pool)
    generator = torch.Generator().manual_seed(5)
    running: list[Generation] = []
    for slot, params in enumerate(sampling):
        prompt = torch.randint(3, 300, (3 + 2 * slot,), generator=generator).tolist()
        lora_slot = (2, 0, None, 2)[slot % 4] if adapted else None
        running.append(engine.start(slot, prompt, params, lora_slot))
    engine.step(*((each, len(each.prompt)) for each in running))
    for _ in range(2):
        engine.step(*((each, 1) for each in running))
    return [each.outputs for each in running]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tokens_equal_torchs(models: Models, kind: str, adapted: bool) -> None:
    """Greedy, filtered, and one row that the kernels leave to the host, in one batch."""
    sampling = [
        greedy(),
        SamplingParams(max_tokens=9, seed=4, temperature=0.8, top_p=0.9),
        SamplingParams(max_tokens=9, seed=5, top_k=7, min_p=0.02),
        SamplingParams(max_tokens=9, seed=6, repetition_penalty=1.3, logprobs=1),
        SamplingParams(max_tokens=9, seed=7, temperature=1.5),
    ]
    want, got = (answers(model, sampling, adapted) for model in models[kind])
    assert got == want
    if adapted:
        assert got[:2] != answers(models[kind][0], sampling, False)[:2], "adapters change nothing"


def test_only_what_needs_the_host_is_drawn_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = choose_ops("triton").fused_draws(40)
    assert fused is not None
    sampler = Sampler(40, torch.device("cpu"), fused=fused)
    wishes = [
        SamplingParams(max_tokens=9, seed=1, temperature=0.0, min_tokens=2, stop_token_ids=(3,)),
        SamplingParams(max_tokens=9, seed=2, top_p=0.5),
        SamplingParams(max_tokens=9, seed=3, temperature=0.0, logprobs=0),
    ]
    for slot, params in enumerate(wishes):
        sampler.reset(slot, SlotInit(params, (), ()))
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    logits[0, 3] = 50.0
    early = sampler.launch(logits, [Draw(slot, 1) for slot in range(3)])
    assert early.fused == [False, True, False]
    first, *_ = early.result()
    assert isinstance(first, Sample)
    assert first.token_id != 3
    late = sampler.launch(logits, [Draw(slot, 2) for slot in range(3)])
    assert late.fused == [True, True, False]
    assert late.tokens is not None

    def fail(*_: object) -> None:
        raise AssertionError("a row that the kernels draw was drawn on the host")

    monkeypatch.setattr(SlotSampling, "record", fail)
    only = sampler.launch(logits[:2], [Draw(0, 2), Draw(1, 2)])
    assert only.result([3, 7]) == [Sample(3), Sample(7)], "tokens that were read before"
    assert only.tokens is not None
    assert only.tokens.tolist()[0] == 3


def test_a_vocabulary_that_is_too_large_is_left_to_torch() -> None:
    assert choose_ops("triton").fused_draws((1 << 19) + 1) is None
    assert choose_ops("torch").fused_draws(100) is None


def test_nothing_of_triton_is_imported_for_torch() -> None:
    """In a process of its own: in this one it is there already."""
    program = (
        "import sys; from common.engine.runner import ModelRunner\n"
        "from common.engine.ops import choose_ops; choose_ops('torch')\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'triton']\n"
        "assert 'common.engine.kernels' not in sys.modules\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=100)
