"""Prompt logprobs equal transformers' log_softmax, however the prompt is cut up."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.engine.prompt_logprobs import SLICE_TOKENS
from common.messages import TokenLogprob
from common.plan import Batch, Sample
from tests.unit.engine.conftest import Zoo
from tests.unit.engine.driving import Engine, Generation, greedy

Prompt = Callable[..., list[int]]
TOLERANCE = 1e-4


def oracle(zoo: Zoo, variant: str, ids: list[int]) -> Tensor:
    """[tokens, vocab_size]: log probabilities of what follows each token."""
    with torch.inference_mode():
        tokens = torch.tensor([ids])
        logits: Tensor = zoo.reference(variant)(
            tokens, attention_mask=torch.ones_like(tokens)
        ).logits[0]
        return logits.float().log_softmax(dim=-1)


def scored(
    engine: Engine, generation: Generation, chunk: int, wish: int, *others: Generation
) -> list[TokenLogprob]:
    """The prompt's logprobs, computed in chunks beside one token a step of others."""
    prompt, found = generation.prompt, list[TokenLogprob]()
    while generation.computed < len(prompt):
        start = generation.computed
        count = min(chunk, len(prompt) - start)
        row = engine.row(generation, count)
        row = replace(row, prompt_logprobs=wish, next_ids=prompt[start + 1 : start + count + 1])
        beside = [engine.row(other, 1) for other in others]
        result = engine.runner.launch(Batch((*beside, row))).result()
        assert result.prompt_logprobs[: len(beside)] == ((),) * len(beside)
        found += result.prompt_logprobs[-1]
        generation.computed += count
        for other, sample in zip(others, result.samples, strict=False):
            assert isinstance(sample, Sample)
            other.computed += 1
            other.outputs.append(sample.token_id)
    return found


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen3"])
@pytest.mark.parametrize("chunk", [7, SLICE_TOKENS + 9, 1000])
def test_every_prompt_token_has_transformers_logprob(
    zoo: Zoo, prompt: Prompt, variant: str, chunk: int
) -> None:
    ids = prompt(2 * SLICE_TOKENS + 20)
    want = oracle(zoo, variant, ids)
    engine = Engine(zoo.loaded(variant))
    beside = engine.generate(prompt(9, 5), greedy(1), slot=1)
    found = scored(engine, engine.start(0, ids, greedy(4)), chunk, 3, beside)
    assert len(found) == len(ids) - 1
    for position, score in enumerate(found):
        row, token = want[position], ids[position + 1]
        assert score.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert score.rank == int((row > row[token]).sum()) + 1
        values, tops = row.topk(3)
        assert [id_ for id_, _ in score.top] == tops.tolist()
        assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_without_alternatives_only_the_token_is_told(zoo: Zoo, prompt: Prompt) -> None:
    engine = Engine(zoo.loaded("llama"))
    found = scored(engine, engine.start(0, prompt(10), greedy(4)), 1000, 0)
    assert [score.top for score in found] == [()] * 9


def test_nobody_asks_and_nothing_is_told(zoo: Zoo, prompt: Prompt) -> None:
    engine = Engine(zoo.loaded("llama"))
    row = engine.row(engine.start(0, prompt(10), greedy(4)), 10)
    assert engine.runner.launch(Batch((row,))).result().prompt_logprobs == ()


def test_logits_are_made_a_slice_at_a_time(
    zoo: Zoo, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = zoo.loaded("llama")
    rows: list[int] = []
    logits = loaded.model.logits

    def watched(hidden: Tensor) -> Tensor:
        rows.append(hidden.shape[0])
        return logits(hidden)

    monkeypatch.setattr(loaded.model, "logits", watched)
    engine = Engine(loaded)
    scored(engine, engine.start(0, prompt(3 * SLICE_TOKENS), greedy(4)), 1000, 1)
    assert max(rows) == SLICE_TOKENS
    assert sum(rows) == 3 * SLICE_TOKENS - 1 + 1, "the prompt's, and the one to draw from"
