"""Logprobs of prompts, and the choice of the best, in the forms of all APIs."""

import json

import msgspec
import pytest

from common.messages import TokenLogprob
from router.best_of import best_of
from router.generation import ChoiceResult
from router.protocol.prompt_scores import TokenTexts, as_openai, as_sglang, as_vllm
from router.text_stream import TokenRecord
from router.tokens import TextCodec

INFINITE = float("-inf")


@pytest.fixture
def texts(codec: TextCodec) -> TokenTexts:
    return TokenTexts(codec)


def test_vllms_form_has_the_token_first_and_the_others_by_rank(texts: TokenTexts) -> None:
    a, b, c, d = texts.codec.encode_now("abcd")
    scores = [
        TokenLogprob(-2.0, ((a, -0.5), (c, -1.0)), rank=7),
        TokenLogprob(-0.25, ((c, -0.25), (d, INFINITE)), rank=1),
    ]
    first, second, third = as_vllm([a, b, c], scores, texts)
    assert first is None
    assert second == {
        str(b): {"logprob": -2.0, "rank": 7, "decoded_token": "b"},
        str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        str(c): {"logprob": -1.0, "rank": 2, "decoded_token": "c"},
    }
    assert list(second) == [str(b), str(a), str(c)]
    assert third == {
        str(c): {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
        str(d): {"logprob": -9999.0, "rank": 2, "decoded_token": "d"},
    }
    json.loads(msgspec.json.encode([first, second, third]))


def test_openais_form_has_four_lists_of_one_length(texts: TokenTexts) -> None:
    ids = texts.codec.encode_now("ab👍c")
    scores = [TokenLogprob(-float(i), ((ids[0], -0.5), (ids[1], -0.75))) for i in ids[1:]]
    form = as_openai(ids, scores, 1, "ab👍c", texts)
    assert {len(values) for values in form.values()} == {len(ids)}
    assert form["token_logprobs"][:2] == [None, -float(ids[1])]
    assert form["top_logprobs"][:2] == [None, {"a": -0.5, "b": -float(ids[1])}]
    assert form["text_offset"] == [0, 1, 2, 2, 2, 2, 3]


def test_a_token_before_the_text_takes_no_place_in_it(texts: TokenTexts) -> None:
    ids = [1, *texts.codec.encode_now("ab")]
    assert texts[1] == "<|im_start|>"
    scores = [TokenLogprob(-1.0)] * 2
    assert as_openai(ids, scores, 0, "ab", texts)["text_offset"] == [0, 0, 1]
    written = as_openai(ids, scores, 0, "<|im_start|>ab", texts)["text_offset"]
    assert written == [0, len("<|im_start|>"), len("<|im_start|>") + 1]


def test_sglangs_form_begins_where_asked_with_a_token_that_has_none(texts: TokenTexts) -> None:
    a, b, c = texts.codec.encode_now("abc")
    scores = [TokenLogprob(-1.0, ((a, -0.5), (b, -0.6))), TokenLogprob(-2.0, ((c, -2.0), (a, -3)))]
    tokens, tops = as_sglang([a, b, c], scores, 0, 1, texts)
    assert tokens == [[None, a, "a"], [-1.0, b, "b"], [-2.0, c, "c"]]
    assert tops == [None, [[-0.5, a, "a"]], [[-2.0, c, "c"]]]
    tokens, tops = as_sglang([a, b, c], scores, 1, 0, None)
    assert tokens == [[None, b, None], [-2.0, c, None]]
    assert tops == [None, []]
    assert as_sglang([a, b, c], scores, 3, 0, None) == ([], [])


def result(text: str, *logprobs: float) -> ChoiceResult:
    records = [TokenRecord(5, TokenLogprob(logprob), 0) for logprob in logprobs]
    return ChoiceResult(text=text, logprobs=records)


def test_the_best_have_the_highest_logprob_per_token() -> None:
    """Per token: a long answer does not lose for its length."""
    drawn = [
        result("short", -1.0),
        result("long", -0.5, -0.5, -0.5),
        result("none"),
        result("bad", -9.0),
        # the next prompt's
        result("x", -3.0),
        result("y", -3.0),
        result("z", -2.0),
        result("w", -4.0),
    ]
    assert [best.text for best in best_of(drawn, 4, 2)] == ["long", "short", "z", "x"]
