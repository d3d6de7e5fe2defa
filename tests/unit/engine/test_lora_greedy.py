"""Answers with adapters equal PEFT's, however batches are mixed; the base model's stay its own."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from common.engine.loader import DTYPES, DtypeName
from common.engine.lora.pool import LoraPool
from common.engine.lora.reader import read_folder
from tests.adapters import ADAPTERS, PeftOracle, make_adapters
from tests.unit.engine.conftest import VARIANTS, Zoo
from tests.unit.engine.driving import Engine, Generation, greedy

Prompt = Callable[..., list[int]]
NAMES: Sequence[str | None] = (None, *ADAPTERS)
KINDS = ("llama-biases", "smollm2", "mistral", "qwen2", "qwen3")


class Adapted:
    """A variant with all of `ADAPTERS`, natively and in PEFT."""

    def __init__(self, zoo: Zoo, variant: str, root: Path) -> None:
        self.loaded = zoo.loaded(variant)
        self.folders = make_adapters(zoo.folder(variant), root / variant)
        self.oracle = PeftOracle(zoo.folder(variant), self.folders)

    def pool(self, dtype: torch.dtype = torch.float32) -> LoraPool:
        pool = LoraPool(self.loaded.spec, dtype, len(ADAPTERS), 40)
        for name in ADAPTERS:
            self.place(pool, self.slot(name), name)
        return pool

    def place(self, pool: LoraPool, slot: int | None, name: str) -> None:
        assert slot is not None
        adapter = read_folder(self.folders[name], self.loaded.spec, 256)
        pool.place(slot, adapter, lambda: None)

    @staticmethod
    def slot(name: str | None) -> int | None:
        return None if name is None else list(ADAPTERS).index(name)


@pytest.fixture(scope="module")
def adapted(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    root = tmp_path_factory.mktemp("adapters")
    known: dict[str, Adapted] = {}

    def get(variant: str) -> Adapted:
        if variant not in known:
            known[variant] = Adapted(zoo, variant, root)
        return known[variant]

    return get


def run_mixed(engine: Engine, work: Sequence[tuple[str | None, list[int], int]]) -> list[list[int]]:
    """All at once: each in chunks of its own size, so chunks and single rows meet in one batch."""
    generations: list[Generation] = []
    for slot, (name, prompt, count) in enumerate(work):
        generations.append(engine.start(slot, prompt, greedy(count), Adapted.slot(name)))
    turn = 0
    while running := [g for g in generations if len(g.outputs) < g.sampling.max_tokens]:
        turn += 1
        batch = []
        for generation in running:
            left = len(generation.tokens) - generation.computed
            batch.append((generation, min(left, 3 + (turn * 7 + generation.slot * 5) % 11)))
        engine.step(*batch[turn % len(batch) :], *batch[: turn % len(batch)])
    for generation in generations:
        engine.release(generation)
    return [generation.outputs for generation in generations]


@pytest.mark.parametrize("variant", KINDS)
def test_mixed_batches_equal_peft(
    adapted: Callable[[str], Adapted], prompt: Prompt, variant: str
) -> None:
    """The base model and five adapters of different ranks and targets, twice, in one batch."""
    model = adapted(variant)
    engine = Engine(model.loaded, lora=model.pool())
    names = [*NAMES, "qv-4", "all-8"]
    work = [(name, prompt(9 + 4 * n, n), 12 + n) for n, name in enumerate(names)]
    want = [model.oracle.greedy(*each) for each in work]
    assert run_mixed(engine, work) == want
    base = model.oracle.greedy(None, work[1][1], 13)
    assert want[1] != base, "an adapter that changes nothing would prove nothing"


def test_adapters_differ_from_each_other(adapted: Callable[[str], Adapted], prompt: Prompt) -> None:
    model = adapted("qwen3")
    answers = [tuple(model.oracle.greedy(name, prompt(20), 10)) for name in NAMES]
    assert len(set(answers)) == len(NAMES)


@pytest.mark.parametrize("chunk", [5, 1000])
@pytest.mark.parametrize("name", list(ADAPTERS))
def test_each_alone_equals_peft(
    adapted: Callable[[str], Adapted], prompt: Prompt, name: str, chunk: int
) -> None:
    model = adapted("smollm2")
    engine = Engine(model.loaded, lora=model.pool())
    got = engine.generate(prompt(31), greedy(16), chunk=chunk, lora_slot=model.slot(name))
    assert got.outputs == model.oracle.greedy(name, prompt(31), 16)


def test_rows_of_the_base_model_stay_bitwise_the_same(
    adapted: Callable[[str], Adapted], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batch with and without adapters in its other rows: equal logits for base rows."""
    model = adapted("llama-biases")
    engine = Engine(model.loaded, lora=model.pool())
    seen: list[torch.Tensor] = []
    logits_of = engine.runner._core.model.logits

    def watched(*arguments: object) -> torch.Tensor:
        seen.append(logits_of(*arguments).clone())  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(engine.runner._core.model, "logits", watched)
    names = [None, "all-8", None, "qv-4", "odd-layers-33", None]
    logits = []
    for adapters in (names, [None] * len(names)):
        seen.clear()
        generations = [
            engine.start(slot, prompt(6 + slot, slot), greedy(9), Adapted.slot(name))
            for slot, name in enumerate(adapters)
        ]
        engine.step(*((g, len(g.prompt)) for g in generations))
        for generation in generations:  # the same tokens in both runs
            generation.outputs[:] = [17]
        engine.step(*((g, 1) for g in generations))
        for generation in generations:
            engine.release(generation)
        logits.append(list(seen))
    for mixed, alone in zip(*logits, strict=True):
        for row, name in enumerate(names):
            assert torch.equal(mixed[row], alone[row]) == (name is None), row


def test_a_slot_that_is_used_again_keeps_nothing(
    adapted: Callable[[str], Adapted], prompt: Prompt
) -> None:
    model = adapted("qwen3")
    pool = LoraPool(model.loaded.spec, torch.float32, 2, 40)
    engine = Engine(model.loaded, lora=pool)
    history = ["odd-layers-33", "all-8", "qv-4", "uneven-12", "mlp-16-rslora", "odd-layers-33"]
    for turn, name in enumerate(history):
        model.place(pool, turn % 2, name)
        both = history[max(0, turn - 1) : turn + 1]
        generations = [
            engine.start(slot, prompt(14, turn), greedy(8), (turn - len(both) + 1 + slot) % 2)
            for slot in range(len(both))
        ]
        engine.step(*((g, 14) for g in generations))
        for _ in range(7):
            engine.step(*((g, 1) for g in generations))
        for generation, expected in zip(generations, both, strict=True):
            assert generation.outputs == model.oracle.greedy(expected, prompt(14, turn), 8), name
            engine.release(generation)


def test_a_placement_that_is_broken_off_leaves_the_slot_empty(
    adapted: Callable[[str], Adapted], prompt: Prompt
) -> None:
    model = adapted("qwen3")
    pool = model.pool()
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise InterruptedError

    adapter = read_folder(model.folders["all-8"], model.loaded.spec, 256)
    with pytest.raises(InterruptedError):
        pool.place(1, adapter, stop)
    with pytest.raises(KeyError):
        pool.slot(1)
    model.place(pool, 1, "qv-4")
    engine = Engine(model.loaded, lora=pool)
    got = engine.generate(prompt(20), greedy(8), lora_slot=1)
    assert got.outputs == model.oracle.greedy("qv-4", prompt(20), 8)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_16_bit_adapters_are_close_to_peft(
    zoo: Zoo,
    adapted: Callable[[str], Adapted],
    prompt: Prompt,
    monkeypatch: pytest.MonkeyPatch,
    native: bool,
    dtype: DtypeName,
    bound: float,
) -> None:
    """With a float32 pool, and with one of the same dtype as on a CPU that multiplies it."""
    monkeypatch.setattr("common.engine.lora.pool.is_native", lambda _: native)
    model = adapted("llama-biases")
    pool = model.pool(DTYPES[dtype])
    assert pool.dtype is (DTYPES[dtype] if native else torch.float32)
    engine = Engine(zoo.loaded("llama-biases", dtype), lora=pool)
    seen: list[torch.Tensor] = []
    logits_of = engine.runner._core.model.logits

    def watched(*arguments: object) -> torch.Tensor:
        seen.append(logits_of(*arguments))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(engine.runner._core.model, "logits", watched)
    for name in ADAPTERS:
        want = model.oracle.logits(name, prompt(24))[-1]
        base = model.oracle.logits(None, prompt(24))[-1]
        engine.release(engine.generate(prompt(24), greedy(1), lora_slot=model.slot(name)))
        error = float((seen[-1][0].float() - want).norm() / want.norm())
        assert error < bound, f"{name}: {error}"
        assert float((base - want).norm() / want.norm()) > 0.3


def test_every_architecture_is_covered() -> None:
    assert {VARIANTS[kind][0] for kind in KINDS} == {kind for kind, _ in VARIANTS.values()}
