"""float32 greedy output equals transformers' token for token, however the work is cut up."""

from collections.abc import Callable

import pytest
import torch

from common.engine.attention.base import AttentionBatch, Span
from common.engine.attention.torch_backend import MAX_PADDED_PAGES, TorchAttention
from common.engine.loader import DTYPES, DtypeName
from tests.unit.engine.conftest import VARIANTS, Zoo
from tests.unit.engine.driving import Engine, Generation, greedy

Prompt = Callable[..., list[int]]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [5, 1000])
def test_every_family_in_chunks_and_whole(
    zoo: Zoo, prompt: Prompt, variant: str, chunk: int
) -> None:
    engine = Engine(zoo.loaded(variant))
    want = zoo.greedy(variant, prompt(73), 32)
    assert len(set(want)) > 5, "a constant output would prove nothing"
    assert engine.generate(prompt(73), greedy(32), chunk=chunk).outputs == want


@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_chunks_longer_than_a_query_tile(zoo: Zoo, prompt: Prompt, variant: str) -> None:
    engine = Engine(zoo.loaded(variant), page_size=16)
    want = zoo.greedy(variant, prompt(200), 8)
    for chunk in (150, 1000):
        generation = engine.generate(prompt(200), greedy(8), chunk=chunk)
        engine.release(generation)
        assert generation.outputs == want


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_page_boundaries(zoo: Zoo, prompt: Prompt, length: int) -> None:
    engine = Engine(zoo.loaded("smollm2"), page_size=16)
    want = zoo.greedy("smollm2", prompt(length), 20)
    assert engine.generate(prompt(length), greedy(20)).outputs == want


def test_up_to_the_last_position(zoo: Zoo, prompt: Prompt) -> None:
    engine = Engine(zoo.loaded("qwen3"), page_size=16, max_len=64)
    generation = engine.generate(prompt(60), greedy(4))
    assert generation.outputs == zoo.greedy("qwen3", prompt(60), 4)
    engine.step((generation, 1))
    with pytest.raises(AssertionError, match="beyond the model's length"):
        engine.step((generation, 1))


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2-sliding"])
def test_mixed_batches_at_different_stages(zoo: Zoo, prompt: Prompt, variant: str) -> None:
    """Chunks, first tokens and decode rows of unequal lengths in one batch; slots reused."""
    engine = Engine(zoo.loaded(variant))
    lengths = [1, 3, 4, 5, 40, 90, 17, 8, 61, 2, 33, 120]
    waiting = [(prompt(length, seed), 10 + seed) for seed, length in enumerate(lengths)]
    want = [zoo.greedy(variant, tokens, count) for tokens, count in waiting]
    free_slots = list(range(5))
    running: list[tuple[int, Generation]] = []
    got: dict[int, list[int]] = {}
    queue = list(enumerate(waiting))
    turn = 0
    while queue or running:
        turn += 1
        while queue and free_slots:
            number, (tokens, count) = queue.pop(0)
            running.append((number, engine.start(free_slots.pop(), tokens, greedy(count))))
        work = []
        for number, generation in running:
            left = len(generation.tokens) - generation.computed
            work.append((generation, min(left, 7 + (turn + number) % 5)))
        engine.step(*work[turn % len(work) :], *work[: turn % len(work)])
        for number, generation in list(running):
            if len(generation.outputs) == generation.sampling.max_tokens:
                got[number] = generation.outputs
                engine.release(generation)
                free_slots.append(generation.slot)
                running.remove((number, generation))
    assert [got[number] for number in range(len(want))] == want


def test_decode_batch_of_very_unequal_lengths(zoo: Zoo, prompt: Prompt) -> None:
    """Several decode groups in one step, none in the order of the batch."""
    engine = Engine(zoo.loaded("llama"))
    generations = []
    for slot, length in enumerate([130, 2, 50, 7, 128, 49, 1]):
        generation = engine.start(slot, prompt(length, slot), greedy(12))
        engine.step((generation, length))
        generations.append(generation)
    for _ in range(11):
        engine.step(*((generation, 1) for generation in generations))
    for generation in generations:
        assert generation.outputs == zoo.greedy("llama", generation.prompt, 12)


def test_decode_reads_little_more_than_it_must(zoo: Zoo) -> None:
    """Short sequences beside long ones cost no more than their own pages and a little padding."""
    engine = Engine(zoo.loaded("llama"), page_size=4)
    attention = TorchAttention(engine.cache, 6, (None, 12, None), torch.float32)
    starts = [0, 250, 3, 251, 7, 120, 8, 9, 200, 1]
    spans = [Span(slot, start, 1) for slot, start in enumerate(starts)]
    batch = AttentionBatch(
        spans,
        torch.zeros(len(spans), 64, dtype=torch.int64),
        torch.arange(len(spans)),
        torch.tensor(starts),
    )
    plan = attention.plan(batch)
    read = {
        window: sum(len(decode.gather) // (2 * engine.cache.num_kv_heads) for decode in decodes)
        for window, decodes in ((w, p.decodes) for w, p in plan.windows.items())
    }
    needed = sum(start // 4 + 1 for start in starts)
    groups = len(plan.windows[None].decodes)
    assert groups < len(spans), "one product each would be slow for another reason"
    assert needed <= read[None] <= needed + groups * MAX_PADDED_PAGES
    assert read[12] <= len(spans) * 4, "a window of 12 spans at most 4 pages of 4"


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3"])
def test_continues_from_pages_another_runner_wrote(zoo: Zoo, prompt: Prompt, variant: str) -> None:
    """What a transfer does: copy pages, give the first token, go on elsewhere."""
    first, second = Engine(zoo.loaded(variant)), Engine(zoo.loaded(variant), num_pages=99)
    tokens = prompt(46)
    source = first.generate(tokens, greedy(1))
    target = second.start(3, tokens, greedy(24))
    target.outputs, target.computed = list(source.outputs), len(tokens)
    target.pages = [second.free.pop() for _ in source.pages]
    second.cache.tensor[target.pages] = first.cache.tensor[source.pages]
    while len(target.outputs) < 24:
        second.step((target, 1))
    assert target.outputs == zoo.greedy(variant, tokens, 24)


def test_shared_prefix_pages(zoo: Zoo, prompt: Prompt) -> None:
    """A prefix hit: full pages of another request, and only the rest is computed."""
    engine = Engine(zoo.loaded("llama"))
    prefix = prompt(20)
    owner = engine.generate(prefix + prompt(9, 1), greedy(3), slot=0)
    reader = engine.start(1, prefix + prompt(5, 2), greedy(16))
    reader.pages, reader.computed = owner.pages[:5], 20
    while len(reader.outputs) < 16:
        engine.step((reader, len(reader.tokens) - reader.computed))
    assert reader.outputs == zoo.greedy("llama", reader.prompt, 16)
    assert owner.outputs == zoo.greedy("llama", owner.prompt, 3)


def test_what_an_earlier_owner_left_in_a_page_reaches_nobody(zoo: Zoo, prompt: Prompt) -> None:
    engine = Engine(zoo.loaded("llama"), num_pages=40)
    engine.cache.tensor.fill_(float("nan"))
    generations = [engine.start(slot, prompt(3 + 9 * slot), greedy(9)) for slot in range(3)]
    engine.step(*((generation, len(generation.prompt)) for generation in generations))
    for _ in range(8):
        engine.step(*((generation, 1) for generation in generations))
    for generation in generations:
        assert generation.outputs == zoo.greedy("llama", generation.prompt, 9)


def test_warm_up_leaves_no_trace(zoo: Zoo, prompt: Prompt) -> None:
    engine = Engine(zoo.loaded("qwen2"))
    engine.runner.warm_up()
    assert not engine.cache.tensor.any()
    want = zoo.greedy("qwen2", prompt(10), 8)
    assert engine.generate(prompt(10), greedy(8)).outputs == want


def test_bugs_of_a_scheduler_are_caught(zoo: Zoo, prompt: Prompt) -> None:
    engine = Engine(zoo.loaded("llama"))
    for bad in (-1, 300):
        with pytest.raises(AssertionError, match="token id"):
            engine.generate([4, bad], greedy(1))
    generation = engine.start(0, prompt(9), greedy(1))
    engine.free.append(engine.cache.num_pages)
    with pytest.raises(AssertionError, match="outside the pool"):
        engine.step((generation, 9))


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "floor"), [("bfloat16", 0.1), ("float16", 0.015)])
def test_16_bit_logits_are_close_to_transformers(
    zoo: Zoo, prompt: Prompt, variant: str, dtype: DtypeName, floor: float
) -> None:
    """Within what the dtype itself loses: transformers' own distance from float32, doubled."""
    loaded = zoo.loaded(variant, dtype)
    engine = Engine(loaded)
    tokens = prompt(64)
    exact = zoo.reference(variant)(torch.tensor([tokens])).logits[0, -1]
    rounded = zoo.reference(variant).to(DTYPES[dtype])  # type: ignore[arg-type]
    theirs = rounded(torch.tensor([tokens])).logits[0, -1].float()
    zoo.forget(variant)
    sample = engine.generate(tokens, greedy(1, logprobs=300), chunk=23).samples[0]
    assert sample.logprob is not None
    ours = torch.empty(300)
    for token_id, value in sample.logprob.top:
        ours[token_id] = value
    spread = (theirs.log_softmax(-1) - exact.log_softmax(-1)).abs().max()
    assert (ours - exact.log_softmax(-1)).abs().max() < 2 * spread + floor
