"""Drawing under a grammar: the mask among the other wishes, ends, replays, and what fails."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.sampler import Draw, Sampler
from common.grammar.store import GrammarStore
from common.grammar.vocabulary import load_vocabulary
from common.messages import Grammar, GrammarKind, SamplingParams
from common.plan import NotSampled, Sample, SlotInit
from router.tokens import TextCodec, load_codec
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

CPU = torch.device("cpu")
END = 2
PADDED = VOCAB_SIZE + 12
AB = Grammar(GrammarKind.REGEX, "(ab){1,3}")
HOSTILE = Grammar(GrammarKind.REGEX, "(a?){1000}a{1000}")
"""Passes the router's check, and uses up the limits at its second token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def store(folder: Path) -> GrammarStore:
    return GrammarStore(lambda: load_vocabulary(folder, PADDED))


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return load_codec(folder)


def wishes(grammar: Grammar | None = AB, **changes: Any) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": 64, "seed": 7, "stop_token_ids": (END,)}
    return SamplingParams(grammar=grammar, **(fields | changes))


def noise(seed: int) -> torch.Tensor:
    return torch.randn(PADDED, generator=torch.Generator().manual_seed(seed)) * 3


def write(
    store: GrammarStore,
    sampling: SamplingParams,
    outputs: tuple[int, ...] = (),
    most: int = 64,
    logits: torch.Tensor | None = None,
) -> list[int]:
    """The whole output, with its end, that a model of random (or the given) logits draws."""
    sampler = Sampler(PADDED, CPU, store)
    sampler.reset(0, SlotInit(sampling, (5,), outputs))
    ids = list(outputs)
    while len(ids) < most and END not in ids:
        row = noise(len(ids)) if logits is None else logits
        (sample,) = sampler.sample(row.unsqueeze(0), [Draw(0, len(ids))])
        assert isinstance(sample, Sample), sample
        ids.append(sample.token_id)
    return ids


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.5, "top_p": 0.2},
        {"temperature": 1.0, "min_p": 0.5},
        {"temperature": 0.0, "logit_bias": {90: 100.0, 91: 100.0, END: 100.0}},
        {"temperature": 0.0, "logit_bias": dict.fromkeys(range(PADDED), -100.0)},
        {"temperature": 1.0, "repetition_penalty": 1.9},
        {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 1.0, "min_tokens": 40},
        {"temperature": 0.0, "min_tokens": 3},
        {"temperature": 1.0, "logprobs": 2},
    ],
)
def test_no_other_wish_leads_out_of_the_grammar(
    store: GrammarStore, codec: TextCodec, changes: dict[str, Any]
) -> None:
    for seed in range(5):
        ids = write(store, wishes(seed=seed, **changes))
        assert ids[-1] == END
        assert codec.decode(ids[:-1]) in ("ab", "abab", "ababab")


def test_min_tokens_puts_the_end_off_as_far_as_the_grammar_goes(
    store: GrammarStore, codec: TextCodec
) -> None:
    ends = torch.zeros(PADDED)
    ends[END] = 50.0
    assert codec.decode(write(store, wishes(temperature=0.0), logits=ends)[:-1]) == "ab"
    late = write(store, wishes(temperature=0.0, min_tokens=64), logits=ends)
    assert codec.decode(late[:-1]) == "ababab"


def test_logprobs_are_those_of_the_raw_logits(store: GrammarStore) -> None:
    sampler = Sampler(PADDED, CPU, store)
    sampler.reset(0, SlotInit(wishes(logprobs=3, temperature=0.0), (5,), ()))
    row = noise(1)
    (sample,) = sampler.sample(row.unsqueeze(0), [Draw(0, 0)])
    assert isinstance(sample, Sample)
    assert sample.logprob is not None
    expected = row.log_softmax(-1)
    assert math.isclose(sample.logprob.logprob, float(expected[sample.token_id]), rel_tol=1e-4)
    assert [token for token, _ in sample.logprob.top] == row.topk(3).indices.tolist()


def test_a_replay_continues_the_same_output(store: GrammarStore) -> None:
    grammar = Grammar(
        GrammarKind.JSON_SCHEMA,
        '{"type":"array","items":{"type":"integer","minimum":-99,"maximum":99},"maxItems":9}',
    )
    whole = write(store, wishes(grammar, seed=3))
    assert len(whole) > 6
    for known in range(1, len(whole)):
        assert write(store, wishes(grammar, seed=3), tuple(whole[:known])) == whole


def test_what_fails_concerns_its_own_row(store: GrammarStore) -> None:
    sampler = Sampler(PADDED, CPU, store)
    sampler.reset(0, SlotInit(wishes(HOSTILE), (5,), ()))
    sampler.reset(1, SlotInit(wishes(None, temperature=0.0), (5,), ()))
    sampler.reset(2, SlotInit(wishes(), (5,), ()))
    sampler.reset(3, SlotInit(wishes(Grammar(GrammarKind.REGEX, "(")), (5,), ()))
    sampler.reset(4, SlotInit(wishes(), (5,), (250, 251)))
    rows = torch.stack([noise(seed) for seed in range(5)])
    kinds = []
    for index in range(12):
        samples = sampler.sample(rows, [Draw(slot, index) for slot in range(5)])
        kinds.append([type(sample) for sample in samples])
        assert samples[1] == Sample(int(rows[1].argmax()))
        if kinds[-1][0] is NotSampled or index == 2:
            break
    assert kinds[0] == [Sample, Sample, Sample, NotSampled, NotSampled]
    assert kinds[-1][0] is NotSampled
    assert kinds[-1][1] is Sample


def test_a_slot_forgets_the_grammar_of_its_last_owner(store: GrammarStore) -> None:
    sampler = Sampler(PADDED, CPU, store)
    sampler.reset(0, SlotInit(wishes(), (5,), ()))
    sampler.reset(0, SlotInit(wishes(None, temperature=0.0), (5,), ()))
    row = noise(9)
    assert sampler.sample(row.unsqueeze(0), [Draw(0, 0)]) == [Sample(int(row.argmax()))]
