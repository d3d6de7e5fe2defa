"""The sampler against naive references and against what its parameters promise."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.engine.philox import philox4x32, uniform
from common.engine.sampler import Draw, Sampler, SlotSampling, candidates, token_logprob
from common.messages import SamplingParams
from common.plan import Sample, SlotInit

VOCAB = 40
CPU = torch.device("cpu")


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 100, "seed": 1} | changes))


def sample_one(
    logits: torch.Tensor,
    sampling: SamplingParams,
    index: int = 0,
    prompt: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
) -> Sample:
    sampler = Sampler(logits.shape[0], CPU)
    sampler.reset(0, SlotInit(sampling, prompt, outputs))
    return drawn_by(sampler, logits.unsqueeze(0), [Draw(0, index)])[0]


def drawn_by(sampler: Sampler, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Sample]:
    """Where something can be drawn for each row."""
    samples = sampler.sample(logits, draws)
    assert all(isinstance(sample, Sample) for sample in samples)
    return [sample for sample in samples if isinstance(sample, Sample)]


def random_logits(seed: int, size: int = VOCAB) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


# ---------------------------------------------------------------- random numbers


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_gives_the_published_vectors(counter: str, key: str, words: str) -> None:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(int(word, 16) for word in text.split())

    assert philox4x32(parse(counter), parse(key)) == parse(words)


def test_uniform_depends_on_each_part_of_its_key() -> None:
    keys = [(7, 0, 0), (8, 0, 0), (7 + (1 << 40), 0, 0), (7, 1, 0), (7, 0, 1), (-7, 0, 0)]
    assert len({uniform(*key) for key in keys}) == len(keys)
    numbers = torch.tensor([uniform(3, 0, index) for index in range(4000)], dtype=torch.float64)
    assert 0 <= float(numbers.min()) <= float(numbers.max()) < 1
    tenths = torch.histc(numbers, 10, 0, 1)
    assert float(((tenths - 400) ** 2 / 400).sum()) < 27.9, "chi-square, 9 degrees, p = 0.001"


# ---------------------------------------------------------------- what may be drawn


@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_candidates_are_what_a_naive_filter_keeps(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(seed)
    values, ids = candidates(logits, params(top_k=top_k, top_p=top_p, min_p=min_p))
    got = set(range(VOCAB)) if ids is None else set(ids.tolist())
    assert ids is None or torch.equal(logits[ids], values)

    kept = sorted(range(VOCAB), key=lambda token: -float(logits[token]))
    kept = kept[:top_k] if top_k else kept
    best = float(logits.max())
    kept = [token for token in kept if math.exp(float(logits[token]) - best) >= min_p]
    mass = torch.softmax(logits[kept].double(), 0).cumsum(0).tolist()
    before = [0.0, *mass[:-1]]
    sure = {token for token, start in zip(kept, before, strict=True) if start < top_p - 1e-5}
    possible = {token for token, start in zip(kept, before, strict=True) if start < top_p + 1e-5}
    if min_p < 1.0 or len(kept) == 1:  # at 1.0 the best token's own rounding decides
        assert sure <= got <= possible
    assert int(logits.argmax()) in got


def test_nucleus_grows_over_a_large_flat_vocabulary() -> None:
    logits = random_logits(0, 5000) * 0.01
    values, ids = candidates(logits, params(top_p=0.9))
    assert ids is not None
    assert 4400 < len(values) < 4560
    assert float(values.min()) >= float(logits.sort().values[5000 - len(values)])


@given(seed=st.integers(0, 10**6), top_k=st.integers(1, 8), index=st.integers(0, 50))
def test_a_draw_stays_inside_top_k(seed: int, top_k: int, index: int) -> None:
    logits = random_logits(seed)
    token = sample_one(logits, params(top_k=top_k, temperature=3.0, seed=seed), index).token_id
    assert token in logits.topk(top_k).indices


def test_top_k_of_one_and_tiny_temperatures_are_greedy() -> None:
    for seed in range(20):
        logits = random_logits(seed)
        best = int(logits.argmax())
        assert sample_one(logits, params(top_k=1, temperature=5.0)).token_id == best
        assert sample_one(logits, params(temperature=1e-6)).token_id == best
        assert sample_one(logits, params(temperature=2e-5)).token_id == best


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.6}, {"top_p": 0.95}, {"min_p": 0.02}, {"top_k": 6}]
)
def test_frequencies_follow_the_distribution(changes: dict[str, Any]) -> None:
    """Chi-square of 4000 draws against softmax over what the filters keep."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    sampling = params(seed=11, **changes)
    sampler = Sampler(8, CPU)
    sampler.reset(0, SlotInit(sampling, (), ()))
    draws = [Draw(0, index) for index in range(4000)]
    drawn = Counter(s.token_id for s in drawn_by(sampler, logits.repeat(4000, 1), draws))
    values, ids = candidates(logits / sampling.temperature, sampling)
    ids = torch.arange(8) if ids is None else ids
    expected = 4000 * torch.softmax(values, 0)
    assert set(drawn) <= set(ids.tolist())
    counts = torch.tensor([drawn[token] for token in ids.tolist()])
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3, "7 degrees, p = 0.001"


def test_a_replay_draws_the_same_in_any_slot_and_batch() -> None:
    sampling = params(seed=99, choice=2, temperature=0.9, top_p=0.9, repetition_penalty=1.3)
    logits = [random_logits(index) for index in range(12)]
    first = Sampler(VOCAB, CPU)
    first.reset(0, SlotInit(sampling, (1, 2), ()))
    whole = [
        drawn_by(first, row.unsqueeze(0), [Draw(0, index)])[0].token_id
        for index, row in enumerate(logits)
    ]
    second = Sampler(VOCAB, CPU)
    second.reset(0, SlotInit(params(seed=5), (), ()))
    second.reset(3, SlotInit(sampling, (1, 2), tuple(whole[:7])))
    for index in range(7, 12):
        batch = torch.stack([random_logits(77), logits[index]])
        samples = drawn_by(second, batch, [Draw(0, index), Draw(3, index)])
        assert samples[1].token_id == whole[index]


# ---------------------------------------------------------------- adjustments


@given(
    seed=st.integers(0, 10**6),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=20),
    outputs=st.lists(st.integers(0, VOCAB - 1), max_size=20),
    repetition=st.sampled_from([1.0, 0.7, 1.8]),
    presence=st.sampled_from([0.0, 1.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.8, -0.5]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
    min_tokens=st.sampled_from([0, 30]),
)
def test_adjusted_logits_equal_a_naive_reference(
    seed: int,
    prompt: list[int],
    outputs: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    min_tokens: int,
) -> None:
    logits = random_logits(seed)
    sampling = params(
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        min_tokens=min_tokens,
        stop_token_ids=(int(logits.argmax()), 4),
    )
    # Half of the outputs are known at the start, the others are drawn one by one.
    half = len(outputs) // 2
    state = SlotSampling(SlotInit(sampling, prompt, outputs[:half]), VOCAB, CPU)
    for token in outputs[half:]:
        state.record(token)
    before = logits.clone()
    got = state.adjusted(logits, len(outputs))
    assert torch.equal(logits, before), "the raw logits are still needed"

    want = logits.double().tolist()
    for token in range(VOCAB):
        if len(outputs) < min_tokens and token in sampling.stop_token_ids:
            want[token] = -math.inf
        want[token] += bias.get(token, 0.0)
        if token in prompt or token in outputs:
            want[token] = want[token] / repetition if want[token] > 0 else want[token] * repetition
        count = outputs.count(token)
        want[token] -= frequency * count + presence * (count > 0)
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-4)


def test_min_tokens_bans_stop_tokens_until_then() -> None:
    logits = torch.zeros(VOCAB)
    logits[9] = 50.0
    sampling = params(min_tokens=3, stop_token_ids=(9,), temperature=1.0)
    drawn = [sample_one(logits, sampling, index).token_id for index in range(5)]
    assert 9 not in drawn[:3]
    assert drawn[3:] == [9, 9]


def test_a_ban_by_logit_bias_holds_for_drawn_tokens() -> None:
    logits = torch.zeros(3)
    sampling = params(logit_bias={0: -100.0, 2: -100.0})
    assert {sample_one(logits, sampling, index).token_id for index in range(50)} == {1}


# ---------------------------------------------------------------- log probabilities


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(4)
    sampling = params(temperature=0.3, logit_bias={7: 100.0}, logprobs=5, repetition_penalty=2.0)
    sample = sample_one(logits, sampling, prompt=(1, 2, 3))
    reference = logits.log_softmax(-1)
    assert sample.token_id == 7
    assert sample.logprob is not None
    assert sample.logprob.logprob == pytest.approx(float(reference[7]), abs=1e-5)
    values, ids = reference.topk(5)
    assert [token for token, _ in sample.logprob.top] == ids.tolist()
    assert [value for _, value in sample.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_zero_reports_the_chosen_token_only() -> None:
    sample = sample_one(random_logits(1), params(temperature=0.0, logprobs=0))
    assert sample.logprob is not None
    assert sample.logprob.top == ()
    assert sample.logprob.logprob < 0
    assert sample_one(random_logits(1), params()).logprob is None


def test_more_alternatives_than_tokens() -> None:
    assert len(token_logprob(torch.zeros(4), 1, 20).top) == 4


def test_plain_rows_beside_others() -> None:
    sampler = Sampler(VOCAB, CPU)
    sampler.reset(0, SlotInit(params(temperature=0.0), (), ()))
    sampler.reset(1, SlotInit(params(temperature=0.0, logprobs=1), (), ()))
    sampler.reset(2, SlotInit(params(temperature=0.0, logit_bias={3: 100.0}), (), ()))
    rows = torch.stack([random_logits(seed) for seed in range(3)]).to(torch.bfloat16)
    samples = drawn_by(sampler, rows, [Draw(slot, 0) for slot in range(3)])
    best = rows.argmax(-1).tolist()
    assert [sample.token_id for sample in samples] == [best[0], best[1], 3]
    assert [sample.logprob is None for sample in samples] == [True, False, True]
